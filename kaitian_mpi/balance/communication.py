"""The cost of summing gradients: measured, in a larger world, and not hidden behind backward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kaitian_mpi.balance.cost_model import fit
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
        """The number of ranks."""
        return sum(self.ranks_per_kind.values())


def fit_allreduce(sizes: Sequence[int], seconds: Sequence[float]) -> AllreduceCost:
    """Fit a line to measured (bytes, seconds) by relative least squares; neither part is negative.

    Args:
        sizes: bytes, at least 1 each.
        seconds: above 0, one for each size.
    """
    line = fit(sizes, seconds)
    return AllreduceCost(line.alpha_sec, line.beta_sec)


def ddp_buckets(gradient_bytes: int) -> list[int]:
    """Return the bytes of DDP's buckets in the order reduced: 1 MiB first, then 25 MiB each.

    DDP closes a bucket at the parameter that exceeds the limit, so real buckets are a bit larger.
    """
    first = min(gradient_bytes, _FIRST_BUCKET)
    full, remainder = divmod(gradient_bytes - first, _BUCKET_BYTES)
    return [size for size in (first, *[_BUCKET_BYTES] * full, remainder) if size > 0]


def exposed_seconds(
    compute_sec: float, buckets: Sequence[int], cost: AllreduceCost, micro_batches: int = 1
) -> float:
    """Return the seconds of communication that are not hidden behind backward.

    Assumes that forward takes a third of the compute time and that gradients become ready evenly
    over the other two thirds, each bucket at its cumulative part of the bytes; that buckets are
    reduced one after the other; and that communication takes no core from computing. With several
    micro-batches, only the last backward overlaps with communication.

    Args:
        compute_sec: seconds of a rank's forward and backward.
        buckets: bytes, in the order reduced.
        cost: of one allreduce.
        micro_batches: the number that the rank computes per step.

    Returns:
        The time from the end of computing to the end of the last allreduce, in seconds; at least
        the last bucket's time.
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
) -> tuple[AllreduceCost, list[str]]:
    """Return the cost of an allreduce in a world with other numbers of ranks.

    Within a group, the cost of the same kind alone is scaled as a ring's. The groups work
    concurrently, so the slowest counts. The measured extra cost of crossing between groups is added
    unscaled, since only leaders cross. If exactly these ranks were measured, that result is
    returned. In the place of what was not measured is the slowest of what was.

    Args:
        measured: allreduces among one kind alone and between kinds.
        wanted: the number of ranks of each kind, at least 1 each.

    Returns:
        The cost, and a note for each part that had to be estimated.

    Raises:
        UserError: no allreduce of two ranks or more was measured.
    """
    for entry in measured:
        if dict(entry.ranks_per_kind) == dict(wanted):
            return entry.cost, []
    notes: list[str] = []
    inside = _slowest([_inside(measured, kind, ranks, notes) for kind, ranks in wanted.items()])
    if len(wanted) == 1:
        return inside, notes
    between = [entry for entry in measured if len(entry.ranks_per_kind) > 1]
    same = [entry for entry in between if entry.ranks_per_kind.keys() == wanted.keys()]
    if not same:
        notes.append(_guessed(f"between {', '.join(wanted)}", between))
    across = _slowest([_crossing(measured, entry) for entry in same or between])
    cost = AllreduceCost(
        inside.latency_sec + across.latency_sec, inside.sec_per_byte + across.sec_per_byte
    )
    return cost, notes


def _inside(
    measured: Sequence[MeasuredAllreduce], kind: str, ranks: int, notes: list[str]
) -> AllreduceCost:
    """Return the cost of an allreduce within a group of this kind."""
    if ranks == 1:
        return FREE
    known = _alone(measured, kind)
    if known is not None:
        return _ring_scaled(known.cost, known.ranks, ranks)
    several = [entry for entry in measured if entry.ranks > 1]
    notes.append(_guessed(f"inside {kind}", several))
    # Of several kinds, a leader each takes part.
    return _slowest(
        [
            _ring_scaled(_crossing(measured, entry), len(entry.ranks_per_kind), ranks)
            if len(entry.ranks_per_kind) > 1
            else _ring_scaled(entry.cost, entry.ranks, ranks)
            for entry in several
        ]
    )


def _crossing(measured: Sequence[MeasuredAllreduce], entry: MeasuredAllreduce) -> AllreduceCost:
    """Return the extra cost of crossing over the slowest group's own allreduce."""
    groups = [(_alone(measured, kind), ranks) for kind, ranks in entry.ranks_per_kind.items()]
    known = [_ring_scaled(e.cost, e.ranks, ranks) for e, ranks in groups if e is not None]
    inside = _slowest(known)
    return AllreduceCost(
        max(0.0, entry.cost.latency_sec - inside.latency_sec),
        max(0.0, entry.cost.sec_per_byte - inside.sec_per_byte),
    )


def _alone(measured: Sequence[MeasuredAllreduce], kind: str) -> MeasuredAllreduce | None:
    """Return the measurement of this kind alone with the most ranks, at least two."""
    alone = [e for e in measured if e.ranks_per_kind.keys() == {kind} and e.ranks > 1]
    return max(alone, key=lambda entry: entry.ranks, default=None)


def _guessed(what: str, known: Sequence[MeasuredAllreduce]) -> str:
    if not known:
        raise UserError(
            f"no allreduce was measured from which that {what} can be estimated; run kaitian-plan "
            "--save again with two ranks of each kind"
        )
    return f"allreduce {what} was not measured: guessed from the slowest one that was"


def _ring_scaled(cost: AllreduceCost, ranks_then: int, ranks: int) -> AllreduceCost:
    """Scale the latency by log2, and the time per byte as a ring moves 2(n-1)/n of the bytes."""
    calls = math.log2(ranks) / math.log2(ranks_then)
    moved = (1 - 1 / ranks) / (1 - 1 / ranks_then)
    return AllreduceCost(cost.latency_sec * calls, cost.sec_per_byte * moved)


def _slowest(costs: Sequence[AllreduceCost]) -> AllreduceCost:
    """Return the largest latency and time per byte of some costs; 0 of none."""
    return AllreduceCost(
        max((cost.latency_sec for cost in costs), default=0.0),
        max((cost.sec_per_byte for cost in costs), default=0.0),
    )
