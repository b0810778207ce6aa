"""Copies between a device and the host, on streams of their own: one for each direction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from kaitian_mpi.devices import device_of
from kaitian_mpi.devices.protocol import event_to_wait_for
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.observe.timeline.recorder import COPY_BACK, COPY_OUT, part

Event = Any
"""A point of a device's stream, as in `torch.cuda.Event`."""


class _Reached:
    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Copies:
    """Copies the chunks of one device's tensor out and back; used by one thread at a time.

    These are of a device without streams: done when the call returns.
    """

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the tensor's memory, if its user drops it, until the copies are done."""

    def begin(self, tensor: torch.Tensor) -> None:
        """Keep the tensor, and let its copies come after what the current stream has to do."""

    def copy_out(self, host: torch.Tensor, chunk: torch.Tensor, free: Event | None) -> Event:
        """Start copying a chunk to host memory, once the device has reached `free`; return the end.

        The host itself must wait for it: if only a stream waited, the host would reduce stale data
        (pytorch/pytorch#170239).
        """
        with part("copy out", COPY_OUT, bytes=chunk.nbytes):
            host.copy_(chunk)
        return _Reached()

    def copy_back(self, chunk: torch.Tensor, host: torch.Tensor) -> Event:
        """Start copying host memory back to a chunk whose copy out is done; return the end."""
        with part("copy back", COPY_BACK, bytes=chunk.nbytes):
            chunk.copy_(host)
        return _Reached()

    def end(self) -> None:
        """Let later work on the current stream come after all copies; does not block the host."""

    def on_back_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which the current stream is that of the copies back."""
        return nullcontext()


class StreamCopies(Copies):
    """Copies on two side streams of an accelerator.

    PCIe is full duplex and devices have a copy engine for each direction, so a copy out and a copy
    back take no longer together than alone; on one stream they would follow each other. Neither
    delays work on the streams that compute.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._device = device
        self.out = module.Stream(device)
        self.back = module.Stream(device)
        self._last: Any = None

    def keep(self, tensor: torch.Tensor) -> None:
        for stream in (self.out, self.back):
            device_of(self._device).keep_until_done(tensor, stream)

    def begin(self, tensor: torch.Tensor) -> None:
        # The stream back need not wait: its copies are queued after the host has waited for a
        # copy out.
        self.keep(tensor)
        self.out.wait_event(self._record(self._module.current_stream(self._device)))

    def copy_out(self, host: torch.Tensor, chunk: torch.Tensor, free: Event | None) -> Event:
        with self._module.stream(self.out):
            if free is not None:
                self.out.wait_event(free)
            with self._shown(COPY_OUT, "copy out", chunk):
                host.copy_(chunk, non_blocking=True)
            return self._record(self.out)

    def copy_back(self, chunk: torch.Tensor, host: torch.Tensor) -> Event:
        with self._module.stream(self.back):
            with self._shown(COPY_BACK, "copy back", chunk):
                chunk.copy_(host, non_blocking=True)
            self._last = self._record(self.back)
            return self._last

    def end(self) -> None:
        if self._last is not None:
            self._module.current_stream(self._device).wait_event(self._last)
            self._last = None

    def on_back_stream(self) -> AbstractContextManager[Any]:
        return self._module.stream(self.back)

    def _record(self, stream: Any) -> Event:
        event = event_to_wait_for(self._module)
        event.record(stream)
        return event

    @contextmanager
    def _shown(self, lane: str, name: str, chunk: torch.Tensor) -> Iterator[None]:
        """Show the copy in the timeline, if that is recorded, when the device makes it."""
        current = recorder.current
        if current is None or current.collective_lane is None:
            yield
            return
        start = device_of(self._device).mark()
        yield
        end = device_of(self._device).mark()
        current.add_device_span(lane, name, start, end, {"bytes": chunk.nbytes})


def copies_of(device: torch.device) -> Copies:
    """Return the copies of a device's tensors."""
    module = device_of(device).streams()
    return Copies() if module is None else StreamCopies(module, device)
