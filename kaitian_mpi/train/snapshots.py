"""Snapshots: the state in each host's memory, from which a restarted job resumes without a disk."""

from __future__ import annotations

import time
from collections.abc import Callable

from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.run import Run

_MAX_SHARE = 0.05


class Snapshots:
    """Saves a snapshot in each host's memory when it is due; does nothing if none is wanted."""

    def __init__(self, run: Run, world: World, make_metadata: Callable[[], RunMetadata]) -> None:
        self._run = run
        self._world = world
        self._make_metadata = make_metadata
        self._saved_at = 0.0
        self._waited_sec = 0.0

    def save_if_due(self, always: bool = False) -> None:
        """Save a snapshot, if it is due. Collective if the state is large.

        Also due after the first step, so that a restarted job needs no benchmark. If training
        waits for it, it is left out if it would take more than 5% of the time.
        """
        run = self._run
        writer = run.checkpoints.in_memory
        step = run.state.progress.step
        is_wanted = always or step == 1
        if writer is None or not (is_wanted or step % run.config.snapshot_every == 0):
            return
        begin = time.monotonic()
        between_sec = begin - self._saved_at + self._waited_sec
        is_wanted = is_wanted or self._waited_sec <= _MAX_SHARE * between_sec
        hosts = [info.host for info in self._world.infos]
        is_first_of_host = hosts.index(self._world.info.host) == self._world.rank
        if is_first_of_host and is_wanted:
            has_waited = run.checkpoints.write(
                writer, run.state, run.state.shared(), self._make_metadata()
            )
            self._saved_at = time.monotonic()
            self._waited_sec = (self._saved_at - begin) * has_waited
        run.checkpoints.wait_if_large(self._world, run.state)
