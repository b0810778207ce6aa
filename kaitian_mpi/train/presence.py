"""Signs of life between ranks, of which some wait for one whose script takes long."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.abort import write_labelled
from kaitian_mpi.runtime.watchdog import Watchdog
from kaitian_mpi.train.step import StepObserver

if TYPE_CHECKING:
    from mpi4py import MPI


class Presence(StepObserver):
    """Exchanges signs of life with the other ranks, in a thread. Not collective.

    A script may evaluate or save on one rank alone, and MPI does not say whether it is alive.

    A rank that has been in a phase without a limit for half a step's limit sends each other rank a
    sign of life at every heartbeat. Where such a rank waits, its own wait begins again, and it
    answers. From the first answer on, the phase of the rank that is waited for has a limit, too: if
    that hangs, its own watchdog ends it, and names it.
    """

    def __init__(self, comm: MPI.Intracomm, watchdog: Watchdog, patience_sec: float) -> None:
        self._comm, self._watchdog, self._patience_sec = comm, watchdog, patience_sec
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
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
        is_awaited, watchdog = bool(self._receive(tags.AWAITED)), self._watchdog
        phase, is_long = watchdog.phase, False
        lasted = time.monotonic() - phase.since
        if not (phase.waits or phase.allowed_sec is None):
            is_long = phase.allowed_sec < math.inf or lasted > watchdog.limit_sec / 2
        if is_long:
            self._send(tags.ALIVE, self._others)
        if is_long and is_awaited and phase.allowed_sec == math.inf:
            watchdog.renew(phase, self._patience_sec)
            write_labelled(
                f"{lasted:.0f} s in {phase}: the other ranks wait for this one, whose watchdog "
                f"ends it after {self._patience_sec:.0f} s more (20 times --step-timeout, or half "
                "an hour)"
            )
        living = self._receive(tags.ALIVE)
        phase = watchdog.phase
        if living and phase.waits:
            watchdog.renew(phase, phase.allowed_sec)
            self._send(tags.AWAITED, living)

    def _send(self, tag: int, ranks: Iterable[int]) -> None:
        from mpi4py import MPI

        for rank in ranks:
            self._comm.Isend([b"", MPI.BYTE], rank, tag).Free()  # it has no buffer to keep

    def _receive(self, tag: int) -> set[int]:
        """Return the ranks of which messages have arrived."""
        from mpi4py import MPI

        ranks, status = set(), MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, tag, status):
            self._comm.Recv([bytearray(), MPI.BYTE], status.Get_source(), tag)
            ranks.add(status.Get_source())
        return ranks
