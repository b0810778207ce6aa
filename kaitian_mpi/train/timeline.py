"""Gathers the ranks' recorded events in the run's timeline."""

from __future__ import annotations

import time
from pathlib import Path

from kaitian_mpi.mpi.exchange import gather_bytes, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.observe.timeline.chrome import (
    SEPARATOR,
    ChromeLanes,
    process_lines,
    run_lines,
    status_lines,
)
from kaitian_mpi.observe.timeline.clock import Offset
from kaitian_mpi.observe.timeline.recorder import Event, Recorder
from kaitian_mpi.observe.timeline.timeline_file import TimelineFile
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.clock_alignment import align_clocks

_MIN_INTERVAL_SEC = 10.0
_INTERVAL_PER_COST = 200.0  # so that gathering takes at most half a percent of the time
_FIRST_STEPS = 10
_MARGIN_SEC = 1.0  # between the origin and rank 0's first event: others may begin before it


class Timeline:
    """The run's timeline while these ranks train; does nothing without `--timeline`.

    The ranks record events in memory. At intervals they align their clocks and send their events to
    rank 0, which appends them to the file.
    """

    def __init__(self, world: World, folder: Path | None, step: int) -> None:
        """Open the file on rank 0 and align the clocks. Collective, if this process records.

        Args:
            world: the ranks that train.
            folder: the run folder; None where nothing is written.
            step: the last step that is done.
        """
        self._recorder: Recorder | None = recorder.current
        if self._recorder is None:
            return
        self._world = world
        self._nodes = [info.node for info in world.infos]
        self._lanes = ChromeLanes(world.info.world_rank)
        self._is_named = False
        self._shared_at = time.monotonic()
        self._last_step, self._next_step = step, step + _FIRST_STEPS
        self._file: TimelineFile | None = None
        if world.rank == 0 and folder is not None:
            self._file = self._open(folder, self._recorder)
        self._align(self._recorder)

    def step_done(self, step: int) -> None:
        """Gather the events in the file, if that is due after this step. Collective."""
        if self._recorder is not None and step >= self._next_step:
            self.share(step)

    def share(self, step: int) -> None:
        """Gather the events in the file. Collective.

        Args:
            step: the last step that is done.
        """
        if self._recorder is None:
            return
        began = time.monotonic()
        enter_phase("sharing the timeline", waits=True, limited=False)
        self._align(self._recorder)
        lines = SEPARATOR.join(self._lines(self._recorder))
        by_rank = gather_bytes(self._world.comm, lines, root=0)
        if self._file is not None:
            self._file.append(by_rank)
        self._schedule(step, began)

    def finish(self, step: int) -> None:
        """Gather the last events, and complete the file. Collective."""
        if self._recorder is not None:
            self.share(step)
            if self._file is not None:
                self._file.finish()

    def _open(self, folder: Path, recorder: Recorder) -> TimelineFile:
        clock, now = recorder.clock, recorder.now()
        since_origin = (
            clock.run_time(now) if clock.is_aligned else now - recorder.began + _MARGIN_SEC
        )
        file = TimelineFile(folder, time.time() - since_origin)
        if not clock.is_aligned:
            clock.align(now, Offset(time.time() - file.origin - now, 0.0))
        return file

    def _align(self, recorder: Recorder) -> None:
        align_clocks(self._world.comm, self._nodes, recorder.clock, recorder.now)

    def _lines(self, recorder: Recorder) -> list[bytes]:
        """Return this rank's events as lines of the file."""
        info = self._world.info
        lines: list[bytes] = []
        if not self._is_named:
            name = f"{info}, emulated" if info.emulated else str(info)
            lines += process_lines(info.world_rank, name, info.world_rank)
            self._is_named = True
        dropped, recorder.dropped = recorder.dropped, 0
        lines += status_lines(info.world_rank, recorder.now(), recorder.clock, dropped)
        events = recorder.take() + self._device_events(recorder)
        lines += self._lanes.lines(events, recorder.clock)
        return lines + run_lines(recorder.take_run_events(), recorder.clock)

    def _device_events(self, recorder: Recorder) -> list[Event]:
        if not recorder.has_device_spans:
            return []
        # Marks only know the time between each other; this one's is known by the host's clock.
        anchor = self._world.device_kind.mark()
        anchor.wait()
        return recorder.take_device_spans(anchor, recorder.now())

    def _schedule(self, step: int, began: float) -> None:
        """Set the step after which to gather next, the same on every rank."""
        now = time.monotonic()
        figures = gather_values(self._world.comm, [began - self._shared_at, now - began])
        elapsed, cost = (max(values) for values in zip(*figures, strict=True))
        interval = max(_MIN_INTERVAL_SEC, _INTERVAL_PER_COST * cost)
        steps = interval * (step - self._last_step) / max(elapsed, 1e-6)
        self._last_step, self._next_step = step, step + max(1, round(steps))
        self._shared_at = now
