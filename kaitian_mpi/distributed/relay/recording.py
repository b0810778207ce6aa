"""Records the stages of the relay: each chunk's copy out, exchange and copy back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.relay.copies import Copies, Event, StreamCopies
from kaitian_mpi.distributed.relay.pipeline import Exchange
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.observe.timeline.collectives import part
from kaitian_mpi.observe.timeline.recorder import COPY_BACK, COPY_OUT, EXCHANGE


def recorded_exchange(exchange: Exchange) -> Exchange:
    """Return an exchange that records each chunk."""

    def carry_out(chunk: torch.Tensor) -> None:
        with part("exchange", EXCHANGE, bytes=chunk.nbytes):
            exchange(chunk)

    return carry_out


class RecordedCopies:
    """Copies that are recorded; on streams, by marks, at the times when the device makes them."""

    def __init__(self, copies: Copies) -> None:
        """Record these copies, in the thread that carries out the collective."""
        self._copies = copies
        self.begin, self.end = copies.begin, copies.end

    def copy_out(self, host: torch.Tensor, chunk: torch.Tensor, free: Event | None) -> Event:
        """Start copying a chunk to host memory."""
        if isinstance(self._copies, StreamCopies) and free is not None:
            self._copies.out.wait_event(free)  # here, so that this wait is not recorded as copying
        with self._recorded(COPY_OUT, "copy out", chunk):
            return self._copies.copy_out(host, chunk, free)

    def copy_back(self, chunk: torch.Tensor, host: torch.Tensor) -> Event:
        """Start copying host memory back to a chunk."""
        with self._recorded(COPY_BACK, "copy back", chunk):
            return self._copies.copy_back(chunk, host)

    @contextmanager
    def _recorded(self, lane: str, name: str, chunk: torch.Tensor) -> Iterator[None]:
        copies = self._copies
        if not isinstance(copies, StreamCopies):  # the copy is done when the call returns
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
