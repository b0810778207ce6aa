"""The cost of summing gradients: measured, in a larger world, and not hidden behind backward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kaitian_mpi.errors import UserError

_MIB = 2**20
_FIRST_BUCKET = _MIB
_BUCKET_BYTES = 25 * _MIB
_FORWARD = 1 / 3  # part of a step's compute time


@dataclass(frozen=True)
class AllreduceCost:
    """An allreduce of n bytes takes `latency_sec + sec_per_byte * n` seconds."""

    latency_sec: float
    """Seconds per call, independent of the size."""
    sec_per_byte: float
    """Seconds per byte of one rank's buffer."""

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of an allreduce of this many bytes."""
        return self.latency_sec + self.sec_per_byte * nbytes


FREE = AllreduceCost(0.0, 0.0)


@dataclass(frozen=True)
class MeasuredAllreduce:
    """The measured cost of an allreduce among some ranks."""

    ranks_per_kind: Mapping[str, int]
    """The number of ranks of each kind that took part, at least 1 each."""
    cost: AllreduceCost

    @property
    def ranks(self) -> int:
        """The number of ranks of all kinds."""
        return sum(self.ranks_per_kind.values())


def ddp_buckets(gradient_bytes: int) -> list[int]:
    """Return the bytes of DDP's buckets in the order reduced: 1 MiB first, then 25 MiB each.

    DDP closes a bucket at the parameter that exceeds the limit, so real buckets are a bit larger.
    """
    first = min(gradient_bytes, _FIRST_BUCKET)
    full, remainder = divmod(gradient_bytes - first, _BUCKET_BYTES)
    sizes = [first] + [_BUCKET_BYTES] * full + [remainder]
    return [size for size in sizes if size > 0]


def exposed_seconds(
    compute_sec: float, buckets: Sequence[int], cost: AllreduceCost, micro_batches: int = 1
) -> float:
    """Return the seconds from the end of computing to the end of the last allreduce.

    Assumes that forward takes a third of the compute time and that gradients become ready evenly
    over the other two thirds, each bucket at its cumulative part of the bytes; that buckets are
    reduced one after the other; and that communication takes no core from computing. With several
    micro-batches, only the last backward overlaps with communication.
    """
    if not buckets:
        return 0.0
    sizes = np.array(buckets, dtype=float)
    reduce_sec = cost.latency_sec + cost.sec_per_byte * sizes
    backward_left = (1 - _FORWARD) * (1 - np.cumsum(sizes) / sizes.sum())
    before_end = compute_sec / micro_batches * backward_left
    # The queue ends with its last busy period. Any bucket may start that, so take the maximum.
    exposed = np.cumsum(reduce_sec[::-1])[::-1] - before_end
    return float(exposed.max())


def scale_allreduce(
    measured: Sequence[MeasuredAllreduce], wanted: Mapping[str, int]
) -> AllreduceCost:
    """Return the cost of an allreduce in a world with other numbers of ranks.

    Within a group, the cost of the same kind alone is scaled as a ring's. The groups work
    concurrently, so the slowest counts. The measured extra cost of crossing between groups is added
    unscaled, since only leaders cross; the smallest set of measured kinds that includes these
    counts. If exactly these ranks were measured, that result is returned. A kind of which only one
    rank was measured is assumed to be like the slowest ranks.
    """
    for entry in measured:
        if dict(entry.ranks_per_kind) == dict(wanted):
            return entry.cost
    within = _within_groups(measured, wanted)
    if len(wanted) == 1:
        return within
    crossing = [entry for entry in measured if entry.ranks_per_kind.keys() >= wanted.keys()]
    if not crossing:
        raise _not_measured(f"between {', '.join(wanted)}")
    entry = min(crossing, key=lambda entry: (len(entry.ranks_per_kind), -entry.ranks))
    measured_within = _within_groups(measured, entry.ranks_per_kind)
    return AllreduceCost(
        within.latency_sec + max(0.0, entry.cost.latency_sec - measured_within.latency_sec),
        within.sec_per_byte + max(0.0, entry.cost.sec_per_byte - measured_within.sec_per_byte),
    )


def guessed_kinds(measured: Sequence[MeasuredAllreduce], wanted: Mapping[str, int]) -> list[str]:
    """Return the kinds whose allreduce within several ranks was not measured, but guessed."""
    return [kind for kind, ranks in wanted.items() if ranks > 1 and not _alone(measured, kind)]


def _alone(measured: Sequence[MeasuredAllreduce], kind: str) -> list[MeasuredAllreduce]:
    return [
        entry for entry in measured if entry.ranks_per_kind.keys() == {kind} and entry.ranks > 1
    ]


def _within_groups(
    measured: Sequence[MeasuredAllreduce], wanted: Mapping[str, int]
) -> AllreduceCost:
    """Return the largest latency and time per byte within any group."""
    latency_sec = sec_per_byte = 0.0
    for kind, ranks in wanted.items():
        if ranks == 1:
            continue
        closest = max(_alone(measured, kind), key=lambda entry: entry.ranks, default=None)
        if closest is None:
            several = [entry for entry in measured if entry.ranks > 1]
            if not several:
                raise _not_measured(f"inside {kind}")
            closest = max(several, key=lambda entry: entry.cost.seconds(_BUCKET_BYTES))
        # A ring moves 2(n-1)/n of the bytes.
        calls = math.log2(ranks) / math.log2(closest.ranks)
        moved = (1 - 1 / ranks) / (1 - 1 / closest.ranks)
        latency_sec = max(latency_sec, closest.cost.latency_sec * calls)
        sec_per_byte = max(sec_per_byte, closest.cost.sec_per_byte * moved)
    return AllreduceCost(latency_sec, sec_per_byte)


def _not_measured(where: str) -> UserError:
    return UserError(
        f"no allreduce {where} was measured; run kaitian-plan --save again with two ranks of each "
        "kind"
    )
