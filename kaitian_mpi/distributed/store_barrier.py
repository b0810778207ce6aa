"""A barrier in the group's store before a group is created, so that no rank blocks in MPI.

Creating a communicator is a blocking MPI call without a timeout. So the ranks first meet in the
group's own torch store: either every rank learns that all have arrived, or every rank that has gets
an error that names the missing ones.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from kaitian_mpi.errors import CollectiveError, format_ranks

if TYPE_CHECKING:
    import torch.distributed as dist

# Longer naps than those of `runtime/polling.py`: each check is a request to a store that one thread
# serves, perhaps on another host.
_MIN_NAP_SEC, _MAX_NAP_SEC = 1e-3, 0.25
_DEPARTED_INTERVAL_SEC = 0.5
_COMPLETE = b"complete "
_PREFIX = "kaitian"
_COUNT, _OUTCOME = f"{_PREFIX}/count", f"{_PREFIX}/outcome"


class Participants(NamedTuple):
    """The ranks that create a group, as seen by one of them."""

    name: str
    """The function they call, for error messages, such as `new_group`."""
    rank: int
    size: int
    timeout: timedelta


def store_barrier(
    store: dist.Store, participants: Participants, departed: Callable[[list[int]], list[int]]
) -> str:
    """Wait until every rank of the group has arrived; the outcome is the same on every rank.

    Collective, by the store alone. `departed` returns which of the missing ranks have left the job.

    Returns:
        A unique name for the group, the same on every rank.

    Raises:
        CollectiveError: a rank did not arrive within the timeout, or has left the job; also on a
            rank that arrives after the others have given up.
    """
    unique = uuid.uuid4().hex
    if participants.size == 1:
        return unique
    store.set(f"{_PREFIX}/{participants.rank}", "")
    if store.add(_COUNT, 1) == participants.size:
        store.compare_set(_OUTCOME, "", _COMPLETE.decode() + unique)
    outcome = _wait(store, participants, departed)
    if not outcome.startswith(_COMPLETE):
        raise CollectiveError(outcome.decode())
    return outcome.removeprefix(_COMPLETE).decode()


def clear_store_barrier(store: dist.Store, participants: Participants) -> None:
    """Delete the barrier's keys: a script may reuse its store for a group of the same name.

    Every rank must have left the barrier.
    """
    if participants.size > 1:
        keys = [_COUNT, _OUTCOME] if participants.rank == 0 else []
        for key in (*keys, f"{_PREFIX}/{participants.rank}"):
            store.delete_key(key)


def _wait(
    store: dist.Store, participants: Participants, departed: Callable[[list[int]], list[int]]
) -> bytes:
    limit_sec = participants.timeout.total_seconds()
    began = checked = time.monotonic()
    # Polled: `store.wait` would block other threads' use of a TCPStore client, and torch logs its
    # timeouts.
    while not store.check([_OUTCOME]):
        now = time.monotonic()
        failure = ""
        if now - began > limit_sec:
            missing = _missing(store, participants)
            failure = (
                f"timed out after {limit_sec:g} s in {participants.name}: "
                f"waiting for {format_ranks(missing, participants.size)}"
            )
        elif now - checked > _DEPARTED_INTERVAL_SEC:
            checked = now
            left = departed(_missing(store, participants))
            if left:
                failure = (
                    f"{participants.name}: {format_ranks(left, participants.size)} left the job "
                    "without calling it; every rank must call it"
                )
        if failure:  # unless the last rank has arrived at this moment
            return bytes(store.compare_set(_OUTCOME, "", failure))
        time.sleep(min(max((now - began) / 50, _MIN_NAP_SEC), _MAX_NAP_SEC))
    return bytes(store.get(_OUTCOME))


def _missing(store: dist.Store, participants: Participants) -> list[int]:
    return [rank for rank in range(participants.size) if not store.check([f"{_PREFIX}/{rank}"])]
