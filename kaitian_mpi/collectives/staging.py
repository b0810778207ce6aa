"""Copies a device's tensors to host memory, where MPI can access them, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from kaitian_mpi.devices import device_of

_BUFFERS = 3  # of a relay: one is copied to the host, one exchanged, one copied back

Streams = AbstractContextManager[None]

NO_STREAMS: Streams = nullcontext()
"""Where all tensors are on the host."""


class SideStreams:
    """Streams on which a thread other than the caller's works on tensors of an accelerator.

    Each user, such as the worker of one process group, needs its own: with a shared stream, one
    group's operation could wait behind another's that cannot finish before it on other ranks.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Create no stream yet.

        Args:
            device: the device to use if all tensors are on the host.
        """
        self._device = device
        self._streams: dict[torch.device, Any] = {}

    def after_caller(self, *tensors: Any) -> Streams:
        """Return a context manager in which another thread may work on tensors.

        On an accelerator with streams, its work comes after the work already queued on the calling
        thread's current stream, and runs concurrently with work queued there later.

        Args:
            tensors: tensors, and lists and tuples of them; other values are ignored.
        """
        on_device = [tensor for tensor in tensors_in(tensors) if not tensor.is_cpu]
        device = on_device[0].device if on_device else self._device
        module = None if device is None else device_of(device).streams()
        if device is None or module is None:
            return NO_STREAMS
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        stream = self._streams[device]
        for tensor in on_device:
            # If the caller drops it, its memory must not be reused before this stream is done.
            if tensor.device == device:
                _record(tensor, stream)
        reached = module.Event()
        reached.record(module.current_stream(device))
        return _on_stream(module, stream, reached)


@contextmanager
def _on_stream(module: Any, stream: Any, reached: Any) -> Iterator[None]:
    with module.stream(stream):
        stream.wait_event(reached)
        yield


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Keep the memory of another stream's tensor until the current stream is done with it."""
    module = device_of(tensor.device).streams()
    if module is not None:
        _record(tensor, module.current_stream(tensor.device))


def _record(tensor: torch.Tensor, stream: Any) -> None:
    if tensor.layout is torch.sparse_coo:
        tensor._indices().record_stream(stream)
        tensor._values().record_stream(stream)
    elif tensor.layout is torch.strided:
        tensor.record_stream(stream)


def tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors in lists and tuples of any depth."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def ordered_devices(tensors: Iterable[torch.Tensor]) -> list[int | str | torch.device]:
    """Return the devices to pass to a future, so that it synchronizes their streams."""
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    return [*sorted(filter(_is_ordered_by_futures, devices), key=str)]


def synchronize_streams(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for this thread's streams of the tensors' devices, unless futures synchronize them."""
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        module = device_of(device).streams()
        if module is not None and not _is_ordered_by_futures(device):
            module.current_stream(device).synchronize()


def _is_ordered_by_futures(device: torch.device) -> bool:
    return device_of(device).futures_handle_streams


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` if it is contiguous, else a contiguous copy on its device; detached."""
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def to_host(tensor: torch.Tensor, *, read: bool = True) -> torch.Tensor:
    """Return a contiguous copy of `tensor` in host memory; for a contiguous host tensor, itself.

    Args:
        tensor: on any device.
        read: whether the tensor's values are needed in the copy.
    """
    if tensor.is_cpu and is_plain(tensor):
        return tensor.detach() if tensor.requires_grad else tensor
    pins = device_of(tensor.device).pins_memory
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins)
    if read:
        host.copy_(tensor.detach())  # blocking: MPI reads as soon as this returns
    return host


def from_host(host: torch.Tensor, tensor: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy values back to the tensor for which `to_host` or `contiguous` returned `host`.

    With `non_blocking`, the current stream of an accelerator copies them later.
    """
    if host is tensor or (host.device == tensor.device and is_plain(tensor)):
        return
    with writing([tensor]) or nullcontext():
        tensor.detach().copy_(host, non_blocking=non_blocking)


def writing(tensors: list[torch.Tensor]) -> AbstractContextManager[Any] | None:
    """Return a context manager in which tensors may be written; None if none is needed.

    torch does not allow writing tensors of `torch.inference_mode()` outside of the mode, and a
    thread other than the caller's is outside.
    """
    for tensor in tensors:
        if tensor.is_inference():
            return torch.inference_mode()
    return None


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values are contiguous in memory, without lazy conj or neg bits."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def relay_in_chunks(
    chunks: Sequence[torch.Tensor], exchange: Callable[[torch.Tensor], None]
) -> None:
    """Apply `exchange` to each chunk in order, in place: on a host copy, or a host tensor itself.

    On an accelerator with streams, copying the next chunks to the host, exchanging this one and
    copying the previous ones back overlap.

    Args:
        chunks: flat contiguous tensors on one device, none longer than the first. If `exchange` is
            collective, every rank must split its tensor in the same way, on any device.
        exchange: takes a contiguous host tensor.
    """
    device = chunks[0].device
    if chunks[0].is_cpu:
        for chunk in chunks:
            exchange(chunk)
        return
    buffers = [
        torch.empty_like(chunks[0], device="cpu", pin_memory=device_of(device).pins_memory)
        for _ in range(min(_BUFFERS, len(chunks)))
    ]
    events: list[Callable[[], None]] = [_nothing] * len(buffers)

    def fetch(index: int) -> None:
        slot = index % len(buffers)
        buffers[slot][: chunks[index].numel()].copy_(chunks[index], non_blocking=True)
        events[slot] = _mark(device)

    for index in range(min(len(buffers) - 1, len(chunks))):
        fetch(index)
    for index, chunk in enumerate(chunks):
        ahead = index + len(buffers) - 1
        if len(buffers) > 1 and ahead < len(chunks):
            fetch(ahead)  # its buffer's copy back is queued on the stream before this
        elif len(buffers) == 1:
            fetch(index)
        slot = index % len(buffers)
        # The host itself must wait for the event: if only a stream waited, the host would reduce
        # stale data (pytorch/pytorch#170239).
        events[slot]()
        host = buffers[slot][: chunk.numel()]
        exchange(host)
        chunk.copy_(host, non_blocking=True)
    _mark(device)()


def _mark(device: torch.device) -> Callable[[], None]:
    """Record an event on the device's current stream; return a function that waits for it."""
    module = device_of(device).streams()
    if module is None:
        return _nothing  # a device without streams copies before it returns
    event = module.Event()
    event.record(module.current_stream(device))
    return event.synchronize


def _nothing() -> None:
    pass
