"""Gathers the ranks' recorded events in the run's timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kaitian_mpi.mpi.exchange import gather_bytes, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.timeline.clock import AlignedClock, Offset, RoundTrip, estimate_offset
from kaitian_mpi.observe.timeline.recorder import Recorder
from kaitian_mpi.observe.timeline.trace_file import (
    ChromeLanes,
    TimelineFile,
    encode,
    process_events,
    status_events,
)
from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.polling import wait_request
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.state import State
from kaitian_mpi.train.step import Step, StepObserver
from kaitian_mpi.train.step_times import StepReports

if TYPE_CHECKING:
    from mpi4py import MPI

_MIN_INTERVAL_SEC = 10.0
_INTERVAL_PER_COST = 200.0  # so that gathering takes at most half a percent of the time
_FIRST_STEPS = 10
_ROUND_TRIPS = 8
_MARGIN_SEC = 1.0  # between the origin and rank 0's first event: others may begin before it


class Timeline(StepObserver):
    """Writes the run's timeline while these ranks train.

    The ranks record events in memory. At intervals they align their clocks and send their events to
    rank 0, which appends them to the file.
    """

    def __init__(self, world: World, folder: Path | None, recorder: Recorder, state: State) -> None:
        """Open the file on rank 0 and align the clocks. Collective."""
        self._world = world
        self._recorder = recorder
        self._state = state
        self._nodes = [info.node for info in world.infos]
        self._lanes = ChromeLanes(world.info.world_rank)
        name = f"{world.info}, emulated" if world.info.emulated else str(world.info)
        self._naming = process_events(world.info.world_rank, name, world.info.world_rank)
        self._shared_at = time.monotonic()
        self._last_step = state.progress.step
        self._next_step = self._last_step + _FIRST_STEPS
        self._file: TimelineFile | None = None
        if world.rank == 0 and folder is not None:
            self._file = self._open(folder)
        align_clocks(world.comm, self._nodes, recorder.clock, recorder.now)

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        if step.number >= self._next_step:
            self.share()

    def close(self, together: bool) -> None:
        if together:
            self.share()

    def run_finished(self) -> None:
        self.share()
        if self._file is not None:
            self._file.finish()

    def share(self) -> None:
        began = time.monotonic()
        enter_phase("sharing the timeline", waits=True, limited=False)
        align_clocks(self._world.comm, self._nodes, self._recorder.clock, self._recorder.now)
        by_rank = gather_bytes(self._world.comm, self._lines())
        if self._file is not None:
            self._file.append(b"".join(by_rank))
        self._schedule(began)

    def _open(self, folder: Path) -> TimelineFile:
        clock = self._recorder.clock
        now = self._recorder.now()
        since_origin = now - self._recorder.began + _MARGIN_SEC
        if clock.is_aligned:
            since_origin = clock.run_time(now)
        file = TimelineFile(folder, time.time() - since_origin)
        if not clock.is_aligned:
            clock.align(now, Offset(time.time() - file.origin - now, 0.0))
        return file

    def _lines(self) -> bytes:
        """Return this rank's events as lines of the file."""
        rank = self._world.info.world_rank
        recorder = self._recorder
        dropped = recorder.take_dropped()
        naming = self._naming
        self._naming = []
        events = recorder.take() + recorder.take_device_spans(self._world.device_kind.mark)
        return encode(
            [
                *naming,
                *status_events(rank, recorder.now(), recorder.clock, dropped),
                *self._lanes.trace(events, recorder.clock),
            ]
        )

    def _schedule(self, began: float) -> None:
        """Set the step after which to gather next, the same on every rank."""
        step = self._state.progress.step
        now = time.monotonic()
        figures = gather_values(self._world.comm, [began - self._shared_at, now - began])
        elapsed, cost = (max(values) for values in zip(*figures, strict=True))
        interval = max(_MIN_INTERVAL_SEC, _INTERVAL_PER_COST * cost)
        steps = interval * (step - self._last_step) / max(elapsed, 1e-6)
        self._last_step = step
        self._next_step = step + max(1, round(steps))
        self._shared_at = now


def align_clocks(
    comm: MPI.Comm, nodes: Sequence[int], clock: AlignedClock, now: Callable[[], float]
) -> None:
    """Align each rank's clock with the run's time, which rank 0 keeps. Collective.

    The first rank of each host asks rank 0, one after the other. The ranks of a host have the same
    clock. Ranks that wait for their turn sleep.
    """
    firsts = [nodes.index(node) for node in nodes]
    offset = Offset(0.0, 0.0)
    if comm.rank == 0:
        time = now()
        offset = Offset(clock.run_time(time) - time, 0.0)
        for rank in sorted(set(firsts) - {0}):
            _send(comm, rank, 0.0)  # it may ask now
            for _ in range(_ROUND_TRIPS):
                _receive(comm, rank)
                _send(comm, rank, now() + offset.seconds)
    elif comm.rank in firsts:
        _receive(comm, 0)
        offset = estimate_offset([_round_trip(comm, now) for _ in range(_ROUND_TRIPS)])
    offsets = gather_values(comm, offset)
    clock.align(now(), Offset(*offsets[firsts[comm.rank]]))


def _round_trip(comm: MPI.Comm, now: Callable[[], float]) -> RoundTrip:
    sent = now()
    _send(comm, 0, 0.0)
    answered = _receive(comm, 0)
    return RoundTrip(sent, answered, now())


def _send(comm: MPI.Comm, rank: int, value: float) -> None:
    wait_request(comm.Isend(np.array([value]), rank, tags.CLOCK))


def _receive(comm: MPI.Comm, rank: int) -> float:
    value = np.empty(1)
    wait_request(comm.Irecv(value, rank, tags.CLOCK))
    return float(value[0])
