"""Runs torch's profiler on some ranks in some steps, and gathers the traces in the run folder."""

from __future__ import annotations

import gzip
import logging
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import profiler

from kaitian_mpi.config.profile import ProfileWindow, parse_profile
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.observe.files import replacing
from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.polling import wait_request
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.state import State
from kaitian_mpi.train.step import Step, StepObserver, StepReports

if TYPE_CHECKING:
    from mpi4py import MPI

FOLDER = "profile"
_CHUNK_BYTES = 4 << 20
_PREFIX = "kaitian-profile-"
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
        """Start the profiler before the first of the steps."""
        window = self._window
        if window is None or self._first is not None or not window.includes_step(number):
            return
        self._first = number
        if window.includes_rank(self._world.info.world_rank):
            enter_phase("starting the profiler", limited=False)
            self._profile = _start(self._world)

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        """Gather the traces after the last of the steps."""
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
        """Log that the run ended before the steps, if it did."""
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
        with ExitStack() as stack:
            self._gather(self._export(stack), f"steps-{first}-{self._state.progress.step}")

    def _export(self, stack: ExitStack) -> Path | None:
        """Stop the profiler; return its trace, in a folder that `stack` removes, or None."""
        profile, self._profile = self._profile, None
        if profile is None:
            return None
        try:
            profile.stop()
            folder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
            path = Path(stack.enter_context(folder)) / "trace.json.gz"
            profile.export_chrome_trace(str(path))
        except Exception as error:  # the trace is not worth the training
            _log.warning("no profile of this rank: %s: %s", type(error).__name__, error)
            return None
        return path

    def _gather(self, own: Path | None, steps: str) -> None:
        """Send the traces to rank 0, one after the other, which writes them. Collective."""
        world = self._world
        sizes = gather_values(world.comm, own.stat().st_size if own is not None else 0)
        for rank, size in enumerate(sizes):
            if not size:
                continue
            name = f"rank-{world.infos[rank].world_rank}-{steps}.json"
            if world.rank == 0:
                parts = _read(own) if rank == 0 else _receive(world.comm, rank, size)
                self._write(name, parts)
            elif world.rank == rank:
                for part in _read(own):
                    wait_request(world.comm.Isend(part, 0, tags.PROFILE))
        if any(sizes) and self._folder is not None:
            where, which = self._folder / FOLDER, steps.replace("-", " ", 1)
            print_rank_0(world, f"the profile of {which} is in {where}")

    def _write(self, name: str, parts: Any) -> None:
        """Write a trace; if the disk is full, receive the rest and drop it."""
        assert self._folder is not None
        path = self._folder / FOLDER / name
        try:
            with tempfile.TemporaryFile(prefix=_PREFIX) as compressed:
                for part in parts:
                    compressed.write(part)
                compressed.seek(0)
                path.parent.mkdir(exist_ok=True)
                with replacing(path) as file, gzip.open(compressed) as content:
                    shutil.copyfileobj(content, file)
        except OSError as error:
            for _ in parts:
                pass
            reason = error.strerror or error
            _log.warning("%s could not be written: %s; training continues", path, reason)


def _start(world: World) -> Any:
    activities = [profiler.ProfilerActivity.CPU]
    if not world.device_kind.is_host:
        activities = list(profiler.supported_activities())
    profile = profiler.profile(activities=activities)
    try:
        profile.start()
    except Exception as error:  # such as another profiler that is active
        _log.warning("this rank is not profiled: %s: %s", type(error).__name__, error)
        return None
    return profile


def _read(path: Path | None) -> Any:
    assert path is not None
    with path.open("rb") as file:
        while part := file.read(_CHUNK_BYTES):
            yield np.frombuffer(part, dtype=np.uint8)


def _receive(comm: MPI.Comm, rank: int, size: int) -> Any:
    """Return the parts of a file of so many bytes, as they arrive."""
    while size:
        part = np.empty(min(size, _CHUNK_BYTES), dtype=np.uint8)
        wait_request(comm.Irecv(part, rank, tags.PROFILE))
        size -= part.size
        yield part
