"""Which ranks a job keeps when it is restarted without a host. Pure.

mpirun is assumed to map ranks by slot, its default: it fills the first host's slots, then the
second's, in the order of the hostfile. With another mapping (`--map-by node`) an emulated device
may be on another host than before; jobs on real devices are not affected.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kaitian_mpi.runtime.hosts import Host, total_slots


def fewer_ranks(ranks: int | None, left: Sequence[Host]) -> int | None:
    """Return the number of ranks to start on the hosts that are left.

    Args:
        ranks: the number the user asked for; None for as many as there are slots.
        left: the hosts that are left.

    Returns:
        At most the number of slots; `ranks` if a host's slots are not known.
    """
    slots = total_slots(left)
    return ranks if ranks is None or slots is None else min(ranks, slots)


def kept_ranks(placed: Sequence[str], lost: Collection[str], ranks: int) -> list[int]:
    """Return, for each rank of the smaller job, its rank in the whole job, in ascending order.

    If the whole job had free slots, ranks of a lost host move to those.

    Args:
        placed: each rank's host in the whole job.
        lost: the lost hosts.
        ranks: the size of the smaller job.
    """
    surviving = [rank for rank, host in enumerate(placed) if host not in lost]
    unplaced = [rank for rank, host in enumerate(placed) if host in lost]
    return sorted(surviving[:ranks] + unplaced[: max(0, ranks - len(surviving))])


def kinds_of(text: str, kept: Sequence[int], ranks: int) -> str:
    """Return `--emulate-kinds` of the smaller job.

    Args:
        text: the flag's value for the whole job.
        kept: the result of `kept_ranks`.
        ranks: the size of the whole job; a list of another length is returned unchanged.
    """
    labels = text.split(",")
    return ",".join(labels[rank] for rank in kept) if len(labels) == ranks else text


def slowdowns_of(text: str, kept: Sequence[int]) -> str:
    """Return `--emulate-slowdown` of the smaller job: entries are `rank:factor[@step]`.

    Args:
        text: the flag's value for the whole job.
        kept: the result of `kept_ranks`.
    """
    numbers = {str(old): new for new, old in enumerate(kept)}
    entries = [entry.strip().partition(":") for entry in text.split(",")]
    return ",".join(f"{numbers[old]}:{rest}" for old, _, rest in entries if old in numbers)
