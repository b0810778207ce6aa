"""Copies between a device and the host, on streams of their own: one for each direction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from kaitian_mpi.devices import device_of
from kaitian_mpi.devices.accelerator import event_to_wait_for
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.observe.timeline.collectives import part
from kaitian_mpi.observe.timeline.recorder import COPY_BACK, COPY_OUT, EXCHANGE


class Event(Protocol):
    """A point of a device's stream, as in `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Block the calling thread until the device has reached it."""


class _Reached:
    def synchronize(self) -> None:
        pass


class Copies:
    """Copies the chunks of one device's tensor out and back; used by one thread at a time.

    These are of a device without streams: done when the call returns.
    """

    def begin(self, tensor: torch.Tensor) -> None:
        """Let the copies come after the work already queued on the current stream.

        Args:
            tensor: any part of the tensor whose chunks are copied.
        """

    def copy_out(self, host: torch.Tensor, chunk: torch.Tensor, free: Event | None) -> Event:
        """Start copying a chunk to host memory, once the device has reached `free`.

        Returns:
            The end of the copy. The host itself must wait for it: if only a stream waited, the
            host would reduce stale data (pytorch/pytorch#170239).
        """
        host.copy_(chunk)
        return _Reached()

    def copy_back(self, chunk: torch.Tensor, host: torch.Tensor) -> Event:
        """Start copying host memory back to a chunk whose copy out is done.

        Returns:
            The end of the copy, after which the host memory may be written again.
        """
        chunk.copy_(host)
        return _Reached()

    def end(self) -> None:
        """Let later work on the current stream come after all copies; does not block the host."""


class StreamCopies(Copies):
    """Copies on two side streams of an accelerator.

    PCIe is full duplex and devices have a copy engine for each direction, so a copy out and a copy
    back take no longer together than alone; on one stream they would follow each other. Neither
    delays work on the streams that compute.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self.out, self.back = module.Stream(device), module.Stream(device)
        self._last: Any = None

    def on(self, stream: Any) -> Any:
        """Return a context in which one of the two streams is the current one."""
        return self._module.stream(stream)

    def begin(self, tensor: torch.Tensor) -> None:
        # The stream back need not wait: its copies are queued after the host has waited for a
        # copy out.
        for stream in (self.out, self.back):
            # If the caller drops the tensor, its memory must not be reused before they are done.
            device_of(self._device).keep_until_done(tensor, stream)
        self.out.wait_event(self._record(self._module.current_stream(self._device)))

    def copy_out(self, host: torch.Tensor, chunk: torch.Tensor, free: Event | None) -> Event:
        with self._module.stream(self.out):
            if free is not None:
                self.out.wait_event(free)
            host.copy_(chunk, non_blocking=True)
            return self._record(self.out)

    def copy_back(self, chunk: torch.Tensor, host: torch.Tensor) -> Event:
        with self._module.stream(self.back):
            chunk.copy_(host, non_blocking=True)
            self._last = self._record(self.back)
            return self._last

    def end(self) -> None:
        if self._last is not None:
            self._module.current_stream(self._device).wait_event(self._last)
            self._last = None

    def _record(self, stream: Any) -> Event:
        event = event_to_wait_for(self._module)
        event.record(stream)
        return event  # type: ignore[no-any-return]


def copies_of(device: torch.device) -> Copies:
    """Return the copies of a device's tensors."""
    module = device_of(device).streams()
    return Copies() if module is None else StreamCopies(module, device)


class RecordedCopies(Copies):
    """Copies that are recorded; on streams, by marks, at the times when the device makes them."""

    def __init__(self, copies: Copies) -> None:
        """Record these copies, in the thread that carries out the collective."""
        self._copies = copies
        self.begin, self.end = copies.begin, copies.end  # type: ignore[method-assign]

    def copy_out(self, host: torch.Tensor, chunk: torch.Tensor, free: Event | None) -> Event:
        if isinstance(self._copies, StreamCopies) and free is not None:
            self._copies.out.wait_event(free)  # here, so that this wait is not recorded as copying
        with self._recorded(COPY_OUT, "copy out", chunk):
            return self._copies.copy_out(host, chunk, free)

    def copy_back(self, chunk: torch.Tensor, host: torch.Tensor) -> Event:
        with self._recorded(COPY_BACK, "copy back", chunk):
            return self._copies.copy_back(chunk, host)

    @contextmanager
    def _recorded(self, lane: str, name: str, chunk: torch.Tensor) -> Iterator[None]:
        copies = self._copies
        if not isinstance(copies, StreamCopies):
            with part(name, lane, bytes=chunk.nbytes):
                yield
            return
        stream = copies.out if lane == COPY_OUT else copies.back
        start = self._mark(copies, stream, chunk)
        yield
        end = self._mark(copies, stream, chunk)
        if recorder.current is not None:
            recorder.current.add_device_span(lane, name, start, end, {"bytes": chunk.nbytes})

    @staticmethod
    def _mark(copies: StreamCopies, stream: Any, chunk: torch.Tensor) -> Any:
        with copies.on(stream):
            return device_of(chunk.device).mark()


def exchange_recorded(exchange: Callable[[torch.Tensor], None], chunk: torch.Tensor) -> None:
    """Exchange a chunk, and record it."""
    with part("exchange", EXCHANGE, bytes=chunk.nbytes):
        exchange(chunk)
