"""Waits for other ranks by sleeping instead of spinning, as they may need the core."""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.system import prctl

if TYPE_CHECKING:
    from mpi4py import MPI

WaitContext = Callable[[str], AbstractContextManager[Any]]
"""Returns the context of a wait for other ranks, given its name, such as "the owners' values"."""

_YIELD_SEC = 300e-6  # yield so long before the first sleep: ranks that share cores take turns
_MIN_NAP_SEC = 20e-6
# The next sleep's part of the time waited, on a core of its own and on a shared one.
_NAP_FRACTION = 0.02
_SHARED_NAP_FRACTION = 0.1
_MAX_NAP_SEC = 1e-3
# To look a thousand times a second takes 3% of a core. On a shared one, sleeps in a long wait are
# therefore this part of it, but short enough to take a long message from the network in time.
_LONG_NAP_FRACTION = 0.01
_MAX_LONG_NAP_SEC = 5e-3

_shares_core = False

_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1_000


def reduce_timer_slack() -> None:
    """Shorten the timer slack of this thread and those it starts: on Linux it adds 50 us."""
    prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS)


def set_core_sharing(is_shared: bool) -> None:
    """Let waits of this process look less often if another rank computes on its core."""
    global _shares_core
    _shares_core = is_shared


def nap(waited_sec: float, max_sec: float | None = None, min_sec: float = _MIN_NAP_SEC) -> None:
    """Sleep for 2% or 10% of the time waited so far, at least `min_sec`, at most `max_sec`.

    By default, at most 1 ms; on a shared core, at most 1% of a wait for more than 0.1 s, or 5 ms.
    """
    if max_sec is None:
        max_sec = _MAX_NAP_SEC
        if _shares_core:
            max_sec = max(max_sec, min(waited_sec * _LONG_NAP_FRACTION, _MAX_LONG_NAP_SEC))
    part = _SHARED_NAP_FRACTION if _shares_core else _NAP_FRACTION
    time.sleep(min(max(waited_sec * part, min_sec), max_sec))


def wait_until(
    condition: Callable[[], bool],
    limit_sec: float = math.inf,
    max_nap_sec: float | None = None,
    *,
    yield_sec: float = _YIELD_SEC,
    min_nap_sec: float = _MIN_NAP_SEC,
) -> bool:
    """Wait for a condition without spinning; return whether it came true within the limit."""
    if condition():
        return True
    began = time.perf_counter()
    while not condition():
        waited = time.perf_counter() - began
        if waited < yield_sec:
            os.sched_yield()
        elif waited > limit_sec:
            return False
        else:
            nap(waited, max_nap_sec, min_nap_sec)
    return True


class WakeUp:
    """Receives a wake-up message from any rank of `comm`; raises when a rank is lost."""

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi4py import MPI

        self.word = b""
        self._buffer = bytearray(1)
        self._request = comm.Irecv(self._buffer, MPI.ANY_SOURCE, tags.WAKE_UP)

    def has_arrived(self) -> bool:
        """Return whether the message has arrived; must not be called again after True."""
        from mpi4py import MPI

        status = MPI.Status()
        has_arrived = bool(self._request.Test(status))
        if has_arrived:
            self.word = bytes(self._buffer[: status.Get_count()])
        return has_arrived


def wake_up(comm: MPI.Comm, ranks: Iterable[int], word: bytes = b"") -> None:
    """Send a wake-up message to ranks of `comm` that wait with a `WakeUp`."""
    for rank in ranks:
        comm.Send(word, rank, tags.WAKE_UP)


def wait_request(request: MPI.Request, limit_sec: float = math.inf) -> bool:
    """Wait for an MPI request as `wait_until` does; a failed request is kept with its buffers."""
    try:
        return wait_until(request.Test, limit_sec)
    except BaseException:
        keep_alive(request)
        raise


def keep_alive(*buffers: object) -> None:
    """Keep buffers that MPI may still write to until this process has ended.

    By a reference that is never dropped: what a module refers to is freed at the interpreter's end,
    and mpi4py finalizes MPI, which receives what is still on its way, only after that.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffers))


def sleeping_barrier(comm: MPI.Comm) -> None:
    """Wait, as `wait_request` does, until every rank of `comm` has called this. Collective."""
    wait_request(comm.Ibarrier())
