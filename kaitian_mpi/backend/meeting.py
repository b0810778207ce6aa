"""The ranks of a group meet before they make it, so that none waits in MPI for one that is missing.

Making a communicator is a blocking MPI call without a time-out. The meeting takes place in the
group's own torch store, and either every rank learns that all have come, or all learn who has not.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from kaitian_mpi.errors import CollectiveError, format_ranks

if TYPE_CHECKING:
    import torch.distributed as dist

_SHORTEST_SEC, _LONGEST_SEC = 1e-3, 0.25
_LOOKING_SEC = 0.5
_COMPLETE = b"complete "
_PLACE = "kaitian"
_COUNT, _OUTCOME = f"{_PLACE}/count", f"{_PLACE}/outcome"


@dataclass(frozen=True)
class Party:
    """The ranks that make a group, and who this one is."""

    name: str
    """What they do, for errors: `new_group`, say."""
    rank: int
    size: int
    timeout: timedelta


def meet(store: dist.Store, party: Party, departed: Callable[[list[int]], list[int]]) -> str:
    """Wait until every rank of the group has come to make it; the same outcome on every rank.

    Collective, through the store alone.

    Args:
        store: torch's for this group.
        party: the ranks.
        departed: tells which of the ranks that are missing have left the job.

    Returns:
        A name for the group that no other group has, the same on every rank.

    Raises:
        CollectiveError: a rank did not come within the time-out, or has left; also on a rank that
            comes when the others have given up.
    """
    unique = uuid.uuid4().hex
    if party.size == 1:
        return unique
    store.set(f"{_PLACE}/{party.rank}", "")
    if store.add(_COUNT, 1) == party.size:
        store.compare_set(_OUTCOME, "", _COMPLETE.decode() + unique)
    outcome = _wait(store, party, departed)
    if not outcome.startswith(_COMPLETE):
        raise CollectiveError(outcome.decode())
    return outcome.removeprefix(_COMPLETE).decode()


def clear(store: dist.Store, party: Party) -> None:
    """Forget the meeting: a script may use its store again for a group of the same name.

    To be called when every rank is known to have come out of it.
    """
    if party.size > 1:
        keys = [_COUNT, _OUTCOME] if party.rank == 0 else []
        for key in (*keys, f"{_PLACE}/{party.rank}"):
            store.delete_key(key)


def _wait(store: dist.Store, party: Party, departed: Callable[[list[int]], list[int]]) -> bytes:
    limit_sec = party.timeout.total_seconds()
    began = looked = time.monotonic()
    # Asked rather than waited for: a wait would keep other threads from a TCPStore's client, and
    # its end without success would be logged.
    while not store.check([_OUTCOME]):
        now = time.monotonic()
        failure = ""
        if now - began > limit_sec:
            missing = _missing(store, party)
            failure = (
                f"timed out after {limit_sec:g} s in {party.name}: "
                f"waiting for {format_ranks(missing, party.size)}"
            )
        elif now - looked > _LOOKING_SEC:
            looked = now
            left = departed(_missing(store, party))
            if left:
                failure = (
                    f"{party.name}: {format_ranks(left, party.size)} left the job before coming "
                    "here; every rank must call it"
                )
        if failure:  # unless the last rank has come at this moment
            return bytes(store.compare_set(_OUTCOME, "", failure))
        time.sleep(min(max((now - began) / 50, _SHORTEST_SEC), _LONGEST_SEC))
    return bytes(store.get(_OUTCOME))


def _missing(store: dist.Store, party: Party) -> list[int]:
    return [rank for rank in range(party.size) if not store.check([f"{_PLACE}/{rank}"])]
