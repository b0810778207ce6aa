"""Waiting for other ranks, asleep rather than spinning on a core that they may need."""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kaitian_mpi.runtime import tags

if TYPE_CHECKING:
    from mpi4py import MPI

_AWAKE_SEC = 300e-6  # ranks that share cores take turns meanwhile
_SHORTEST_NAP_SEC = 20e-6
_LONGEST_NAP_SEC = 1e-3

_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1_000

_abandoned: list[tuple[object, ...]] = []


def shorten_naps() -> None:
    """Let this thread and those it will start wake up in time: the kernel adds 50 us to a sleep."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)


def nap(waited_sec: float, longest_sec: float = _LONGEST_NAP_SEC) -> None:
    """Sleep for 2% of the time waited so far, from 20 microseconds to `longest_sec`."""
    time.sleep(min(max(waited_sec / 50, _SHORTEST_NAP_SEC), longest_sec))


def wait_until(
    condition: Callable[[], bool],
    limit_sec: float = math.inf,
    longest_nap_sec: float = _LONGEST_NAP_SEC,
) -> bool:
    """Wait for a condition, asleep rather than spinning; return whether it was met in time.

    The naps grow with the time waited, so that waking up late adds 2% to it at most.
    """
    if condition():
        return True
    began = time.perf_counter()
    while not condition():
        waited = time.perf_counter() - began
        if waited < _AWAKE_SEC:
            os.sched_yield()
        elif waited > limit_sec:
            return False
        else:
            nap(waited, longest_nap_sec)
    return True


class Arrival:
    """This rank has come to a point; tells when every rank has. Making one is collective."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._request = comm.Ibarrier()

    def complete(self) -> bool:
        """Return whether every rank has come; once it has, do not ask again."""
        return bool(self._request.Test())


class WakeUp:
    """Waits for a wake-up from any rank of `comm`; at a loss it raises, and MPI prints nothing."""

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi4py import MPI

        self._request = comm.Irecv([bytearray(), MPI.BYTE], MPI.ANY_SOURCE, tags.WAKE_UP)

    def has_arrived(self) -> bool:
        """Return whether a rank has sent one; once one has, do not ask again."""
        return bool(self._request.Test())


def wake_up(comm: MPI.Comm, ranks: Iterable[int]) -> None:
    """Wake up ranks of `comm`, which wait for a `WakeUp`."""
    from mpi4py import MPI

    for rank in ranks:
        comm.Send([b"", MPI.BYTE], rank, tags.WAKE_UP)


def wait_for(request: MPI.Request, limit_sec: float = math.inf) -> bool:
    """Wait for an MPI request as `wait_until`; return whether it completed in time.

    MPI's blocking calls burn a core while they wait for a slower rank; one that shares its cores
    with other ranks, or with its own computing thread, must not.
    """
    return wait_until(request.Test, limit_sec)


def abandon(*kept: object) -> None:
    """Keep a request that will not be waited for, and its buffers, while this process lives.

    MPI may still write to them.
    """
    _abandoned.append(kept)


def wait_quietly(comm: MPI.Comm) -> None:
    """Wait as `wait_for` until every rank of `comm` has come here. Collective."""
    wait_for(comm.Ibarrier())
