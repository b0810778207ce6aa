"""A barrier in a store, after which every rank knows which ranks are missing.

Creating a communicator is a blocking MPI call without a timeout, so the ranks of a new group first
meet in the group's torch store.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kaitian_mpi.errors import CollectiveError, format_ranks

if TYPE_CHECKING:
    import torch.distributed as dist

# Longer naps than those of `runtime/polling.py`: each check is a request to a store that one thread
# serves, perhaps on another host.
_MIN_NAP_SEC, _MAX_NAP_SEC = 1e-3, 0.25
_DEPARTED_INTERVAL_SEC = 0.5
_COUNT, _OUTCOME = "kaitian/count", "kaitian/outcome"

Departed = Callable[[list[int]], list[int]]
"""Returns which of the missing ranks have left the job."""


def store_barrier(
    store: dist.Store, name: str, rank: int, size: int, timeout: timedelta, departed: Departed
) -> str:
    """Wait until every rank of a new group has arrived. Collective, by the store alone.

    Returns a unique name for the group, the same on every rank. `name` is the function that the
    ranks call, for error messages. A rank that arrives after the others have given up fails too.
    """
    if size == 1:
        return uuid.uuid4().hex
    outcome = _meet(store, rank, size, timeout.total_seconds(), departed)
    if "missing" in outcome:
        raise CollectiveError(
            f"timed out after {timeout.total_seconds():g} s in {name}: waiting for "
            f"{format_ranks(outcome['missing'], size)}"
        )
    if "left" in outcome:
        raise CollectiveError(
            f"{name}: {format_ranks(outcome['left'], size)} left the job without calling it; "
            "every rank must call it"
        )
    return str(outcome["unique"])


def clear_store_barrier(store: dist.Store, rank: int) -> None:
    """Delete the barrier's keys: a script may reuse its store for a group of the same name.

    Every rank must have left the barrier.
    """
    for key in (*([_COUNT, _OUTCOME] if rank == 0 else []), f"kaitian/{rank}"):
        store.delete_key(key)


def _meet(
    store: dist.Store, rank: int, size: int, limit_sec: float, departed: Departed
) -> dict[str, Any]:
    """Wait for all ranks; return the outcome, the same on every rank: that of the first to set it.

    It has one entry: a name that is `unique`, or the ranks that are `missing` or have `left`.
    """
    store.set(f"kaitian/{rank}", "")
    if store.add(_COUNT, 1) == size:
        _settle(store, unique=uuid.uuid4().hex)
    began = checked = time.monotonic()
    # Polled: `store.wait` would block other threads' use of a TCPStore client, and torch logs its
    # timeouts.
    while not store.check([_OUTCOME]):
        now = time.monotonic()
        if now - began > limit_sec:
            return _settle(store, missing=_missing(store, size))
        if now - checked > _DEPARTED_INTERVAL_SEC:
            checked = now
            if left := departed(_missing(store, size)):
                return _settle(store, left=left)
        time.sleep(min(max((now - began) / 50, _MIN_NAP_SEC), _MAX_NAP_SEC))
    return dict(json.loads(store.get(_OUTCOME)))


def _settle(store: dist.Store, **outcome: Any) -> dict[str, Any]:
    return dict(json.loads(store.compare_set(_OUTCOME, "", json.dumps(outcome))))


def _missing(store: dist.Store, size: int) -> list[int]:
    return [rank for rank in range(size) if not store.check([f"kaitian/{rank}"])]
