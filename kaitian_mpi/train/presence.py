"""Signs of life between ranks, so that none waits for one that hangs, or ends one that works."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable

from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.abort import write_labeled
from kaitian_mpi.runtime.watchdog import Watchdog
from kaitian_mpi.train.step import StepObserver


class Presence(StepObserver):
    """Exchanges signs of life with the other ranks, in a thread. Not collective.

    A script may evaluate or save on one rank while the others wait for it, and MPI does not say
    whether that rank is alive.

    A rank that is in a phase without a time limit, and has been for half of a step's limit, sends
    a sign of life to all other ranks at every heartbeat. A rank that receives one while it waits
    restarts the limit of its wait, and answers that it waits. From the first answer on, the phase
    of the sender has a limit as well: if the sender hangs, its own watchdog ends it and names it.
    """

    def __init__(self, world: World, watchdog: Watchdog, patience_sec: float) -> None:
        self._comm = world.comm
        self._watchdog = watchdog
        self._patience_sec = patience_sec
        self._others = [rank for rank in range(world.size) if rank != world.rank]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kaitian-presence", daemon=True)
        self._thread.start()

    def close(self, together: bool) -> None:
        """End the exchange; waits for this rank's own thread only."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        from mpi4py import MPI

        while not self._end.wait(self._watchdog.interval_sec):
            try:
                self._exchange()
            except MPI.Exception:  # a rank is lost: its communicator is given up
                return

    def _exchange(self) -> None:
        """Send and receive the messages of one heartbeat."""
        watchdog = self._watchdog
        is_awaited = bool(self._receive(tags.AWAITED))
        phase = watchdog.phase
        phase_sec = time.monotonic() - phase.since
        is_long = False
        if not (phase.waits or phase.allowed_sec is None):
            is_long = phase.allowed_sec < math.inf or phase_sec > watchdog.limit_sec / 2
        if is_long:
            self._send(tags.ALIVE, self._others)
        if is_long and is_awaited and phase.allowed_sec == math.inf:
            watchdog.renew(phase, self._patience_sec)
            write_labeled(
                f"{phase_sec:.0f} s in {phase}: other ranks are waiting for this one; its watchdog "
                f"kills it if it stays there for another {self._patience_sec:.0f} s (20 times "
                "--step-timeout, or half an hour)"
            )
        alive_ranks = self._receive(tags.ALIVE)
        phase = watchdog.phase
        if alive_ranks and phase.waits:
            watchdog.renew(phase, phase.allowed_sec)
            self._send(tags.AWAITED, alive_ranks)

    def _send(self, tag: int, ranks: Iterable[int]) -> None:
        from mpi4py import MPI

        for rank in ranks:
            self._comm.Isend([b"", MPI.BYTE], rank, tag).Free()  # no buffer to keep alive

    def _receive(self, tag: int) -> set[int]:
        """Return the ranks from which messages have arrived."""
        from mpi4py import MPI

        ranks = set()
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, tag, status):
            self._comm.Recv([bytearray(), MPI.BYTE], status.Get_source(), tag)
            ranks.add(status.Get_source())
        return ranks
