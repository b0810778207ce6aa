"""Runs torch's profiler on some ranks in some steps, and gathers the traces in the run folder."""

from __future__ import annotations

import logging
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import profiler

from kaitian_mpi.config.values import ProfileWindow, parse_profile
from kaitian_mpi.mpi.exchange import gather_bytes, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.observe.files import replacing
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.state import State
from kaitian_mpi.train.step import Step, StepObserver, StepReports

FOLDER = "profile"
_log = logging.getLogger(__name__)


class ProfiledSteps(StepObserver):
    """The steps of `--profile`, on some ranks.

    Each chosen rank writes its trace to a file of its own host, compressed; then it is sent to rank
    0, for hosts need not share a file system.
    """

    def __init__(self, text: str, world: World, folder: Path | None, state: State) -> None:
        """Prepare, without starting the profiler. Not collective."""
        self._window: ProfileWindow | None = parse_profile(text)
        self._world, self._folder, self._state = world, folder, state
        self._first: int | None = None
        self._profile: Any = None

    def step_begins(self, number: int) -> None:
        window = self._window
        if window is None or self._first is not None:
            return
        if not window.first_step <= number <= window.last_step:
            return
        self._first = number
        if window.includes_rank(self._world.info.world_rank):
            enter_phase("starting the profiler", limited=False)
            activities = [profiler.ProfilerActivity.CPU]
            if not self._world.device_kind.is_host:
                activities = list(profiler.supported_activities())
            profile = profiler.profile(activities=activities)
            try:
                profile.start()
                self._profile = profile
            except Exception as error:  # such as another profiler that is active
                _log.warning("this rank is not profiled: %s: %s", type(error).__name__, error)

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        if self._window is not None and step.number >= self._window.last_step:
            self._collect()

    def close(self, together: bool) -> None:
        """Gather the traces of the steps so far; drop them if a rank may be lost."""
        if together:
            self._collect()
            return
        profile, self._profile, self._first = self._profile, None, None
        if profile is not None:
            with suppress(Exception):
                profile.stop()

    def run_finished(self) -> None:
        step = self._state.progress.step
        if self._window is not None and step < self._window.first_step:
            print_rank_0(
                self._world,
                f"--profile: the run ended after step {step}, before step "
                f"{self._window.first_step}: nothing was profiled",
            )

    def _collect(self) -> None:
        """Gather the traces in the run folder, if steps were profiled."""
        first, self._first = self._first, None
        if self._window is None or first is None:
            return
        self._window = None
        enter_phase("writing the profile", limited=False)
        world, own = self._world, self._export()
        steps = f"{first}-{self._state.progress.step}"
        are_there = gather_values(world.comm, bool(own))
        for info, is_there in zip(world.infos, are_there, strict=True):
            if is_there:  # one after the other, to hold no more than one in memory
                trace = gather_bytes(world.comm, own if info == world.info else b"", root=0)
                if world.rank == 0:
                    self._write(f"rank-{info.world_rank}-steps-{steps}.json.gz", b"".join(trace))
        if any(are_there) and self._folder is not None:
            print_rank_0(world, f"the profile of steps {steps} is in {self._folder / FOLDER}")

    def _export(self) -> bytes:
        """Stop the profiler; return its compressed trace, empty if there is none."""
        profile, self._profile = self._profile, None
        if profile is None:
            return b""
        try:
            profile.stop()
            with tempfile.TemporaryDirectory(prefix="kaitian-profile-") as folder:
                path = Path(folder) / "trace.json.gz"
                profile.export_chrome_trace(str(path))
                return path.read_bytes()
        except Exception as error:  # the trace is not worth the training
            _log.warning("no profile of this rank: %s: %s", type(error).__name__, error)
            return b""

    def _write(self, name: str, content: bytes) -> None:
        assert self._folder is not None
        path = self._folder / FOLDER / name
        try:
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as file:
                file.write(content)
        except OSError as error:
            reason = error.strerror or error
            _log.warning("%s could not be written: %s; training continues", path, reason)
