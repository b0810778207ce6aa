"""Copies a device's tensors to host memory, where MPI can access them, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from kaitian_mpi.devices import device_of
from kaitian_mpi.devices.protocol import event_to_wait_for

Streams = AbstractContextManager[None]

NO_STREAMS: Streams = nullcontext()
"""For tensors on the host."""

MAX_PINNED_BYTES = 64 << 20
"""Longer copies are in ordinary memory: torch keeps page-locked memory, which is scarce.

So in a group that has an accelerator, longer tensors go in pieces on all ranks."""


class SideStreams:
    """Streams on which a thread other than the caller's works on tensors of an accelerator.

    Each user, such as the worker of one process group, needs its own: with a shared stream, one
    group's operation could wait behind another's that cannot finish before it on other ranks.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Create no stream yet; `device` is the one to use if all tensors are on the host."""
        self._device = device
        self._streams: dict[torch.device, Any] = {}

    def after_caller(self, *tensors: Any) -> Streams:
        """Return a context manager in which another thread may work on tensors.

        On an accelerator with streams, its work comes after the work already queued on the calling
        thread's current stream, and runs concurrently with work queued there later. `tensors` may
        be in lists and tuples of any depth.
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
        _record(tensor._indices(), stream)
        _record(tensor._values(), stream)
    elif tensor.layout is torch.strided:
        device_of(tensor.device).keep_until_done(tensor, stream)


def tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors in lists and tuples of any depth."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(value)
    return tensors


def ordered_devices(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return the devices to pass to a future, so that it synchronizes their streams."""
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    return sorted(
        (device for device in devices if device_of(device).futures_handle_streams), key=str
    )


class StreamEnd:
    """The work that this thread has queued so far on its current stream of a device."""

    def __init__(self, module: Any, device: torch.device) -> None:
        """Record an event on the stream; `module` has the device's streams, like `torch.cuda`."""
        self.is_handled_by_futures = device_of(device).futures_handle_streams
        """Whether a future makes its reader's stream wait for it."""
        self._module = module
        self._device = device
        self._event = event_to_wait_for(module)
        self._event.record(module.current_stream(device))

    def let_current_stream_wait(self) -> None:
        self._module.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

    def is_reached(self) -> bool:
        return bool(self._event.query())


def ends_of_streams(tensors: Collection[torch.Tensor]) -> list[StreamEnd]:
    """Return the ends of this thread's streams of the tensors' devices."""
    if all(tensor.is_cpu for tensor in tensors):
        return []
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    modules = {device: device_of(device).streams() for device in devices}
    return [StreamEnd(module, device) for device, module in modules.items() if module is not None]


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` if it is contiguous, else a contiguous copy on its device; detached."""
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def to_host(tensor: torch.Tensor, *, read: bool = True) -> torch.Tensor:
    """Return a contiguous copy of `tensor` in host memory; for a contiguous host tensor, itself."""
    if tensor.is_cpu and is_plain(tensor):
        return tensor.detach() if tensor.requires_grad else tensor
    pins = device_of(tensor.device).pins_memory and tensor.nbytes <= MAX_PINNED_BYTES
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins)
    if read:
        host.copy_(tensor.detach())  # blocking: MPI reads as soon as this returns
    return host


def copy_out(tensor: torch.Tensor, streams: SideStreams) -> tuple[torch.Tensor, StreamEnd | None]:
    """Start copying a tensor to host memory, on one of `streams`, which the host does not wait for.

    Returns the copy, and what must be reached before it is read: None if nothing, as for a
    contiguous host tensor, which is returned itself. The device keeps the tensor's memory until
    then, and it must not change.
    """
    module = None if tensor.is_cpu else device_of(tensor.device).streams()
    if module is None:
        return to_host(tensor), None
    host = to_host(tensor, read=False)
    with streams.after_caller(tensor):
        host.copy_(tensor.detach(), non_blocking=True)
        return host, StreamEnd(module, tensor.device)


def from_host(host: torch.Tensor, tensor: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy values back to the tensor for which `to_host` or `contiguous` returned `host`.

    With `non_blocking`, the current stream of an accelerator copies them later.
    """
    if host is tensor or (host.device == tensor.device and is_plain(tensor)):
        return
    with writing([tensor]):
        tensor.detach().copy_(host, non_blocking=non_blocking)


def writing(tensors: list[torch.Tensor]) -> AbstractContextManager[Any]:
    """Return a context manager in which tensors may be written.

    torch does not allow writing tensors of `torch.inference_mode()` outside of the mode, and a
    thread other than the caller's is outside.
    """
    is_inference = any(tensor.is_inference() for tensor in tensors)
    return torch.inference_mode() if is_inference else nullcontext()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values are contiguous in memory, without lazy conj or neg bits."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
