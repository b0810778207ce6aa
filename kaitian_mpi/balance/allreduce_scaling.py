"""Estimates the cost of an allreduce in a world that was not measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kaitian_mpi.balance.communication import BUCKET_BYTES, AllreduceCost, MeasuredAllreduce
from kaitian_mpi.errors import UserError


def scale_allreduce(
    measured: Sequence[MeasuredAllreduce], wanted: Mapping[str, int]
) -> tuple[AllreduceCost, list[str]]:
    """Return the cost of an allreduce in a world with other numbers of ranks.

    Within a group, the cost of the same kind alone is scaled from n to n' ranks: latency by
    log2(n')/log2(n), time per byte by ((n'-1)/n') / ((n-1)/n), as a ring moves 2(n-1)/n of the
    bytes. The groups work concurrently, so the largest of each counts. The measured extra cost of
    crossing between groups is added unscaled, since only leaders cross. If exactly these ranks
    were measured, that result is returned.

    Args:
        measured: allreduces among one kind alone and between kinds.
        wanted: the number of ranks of each kind, at least 1 each.

    Returns:
        The cost, and a note for each part that had to be estimated.

    Raises:
        UserError: no allreduce was measured from which a missing one could be estimated.
    """
    for entry in measured:
        if dict(entry.ranks_per_kind) == dict(wanted):
            return entry.cost, []
    notes: list[str] = []
    inside = _largest_parts([_inside(measured, kind, n, notes) for kind, n in wanted.items()])
    if len(wanted) == 1:
        return inside, notes
    across = _across(measured, frozenset(wanted), notes)
    cost = AllreduceCost(
        inside.latency_sec + across.latency_sec, inside.sec_per_byte + across.sec_per_byte
    )
    return cost, notes


def _inside(
    measured: Sequence[MeasuredAllreduce], kind: str, ranks: int, notes: list[str]
) -> AllreduceCost:
    """Return the cost of an allreduce within a group of this kind."""
    if ranks == 1:
        return AllreduceCost(0.0, 0.0)
    known = _group_of(measured, kind)
    if known is not None:
        return _ring_scaled(known.cost, known.ranks_per_kind[kind], ranks)
    between = [entry for entry in measured if len(entry.ranks_per_kind) > 1]
    near = _of_fewest_kinds([entry for entry in between if kind in entry.ranks_per_kind])
    if between:
        entry = max(near or between, key=lambda e: _reference_seconds(_crossing(measured, e)))
        cost, ranks_then = _crossing(measured, entry), len(entry.ranks_per_kind)
    else:
        entry = _slowest([e for e in measured if _ranks(e) > 1], f"{ranks} {kind} ranks")
        cost, ranks_then = entry.cost, _ranks(entry)
    notes.append(
        f"allreduce inside {kind} was not measured with two ranks or more: guessed from the one "
        f"{'between' if between else 'inside'} {_names(entry)}"
    )
    return _ring_scaled(cost, ranks_then, ranks)


def _across(
    measured: Sequence[MeasuredAllreduce], kinds: frozenset[str], notes: list[str]
) -> AllreduceCost:
    """Return the extra cost of crossing between groups of these kinds."""
    between = [entry for entry in measured if len(entry.ranks_per_kind) > 1]
    same = [entry for entry in between if entry.ranks_per_kind.keys() == kinds]
    if same:
        return _crossing(measured, max(same, key=_ranks))
    more = _of_fewest_kinds([e for e in between if e.ranks_per_kind.keys() > kinds])
    entry = _slowest(more or between, f"{' and '.join(sorted(kinds))} ranks")
    notes.append(
        f"allreduce between {', '.join(sorted(kinds))} was not measured: guessed from the one "
        f"between {_names(entry)}"
    )
    return _crossing(measured, entry)


def _crossing(measured: Sequence[MeasuredAllreduce], entry: MeasuredAllreduce) -> AllreduceCost:
    """Return the extra cost of crossing over the slowest group's own allreduce."""
    inside = []
    for kind, ranks in entry.ranks_per_kind.items():
        known = _group_of(measured, kind)
        if known is not None:
            inside.append(_ring_scaled(known.cost, known.ranks_per_kind[kind], ranks))
    most = _largest_parts(inside)
    return AllreduceCost(
        max(0.0, entry.cost.latency_sec - most.latency_sec),
        max(0.0, entry.cost.sec_per_byte - most.sec_per_byte),
    )


def _group_of(measured: Sequence[MeasuredAllreduce], kind: str) -> MeasuredAllreduce | None:
    """Return the measurement of this kind alone with the most ranks, at least two."""
    alone = [entry for entry in measured if entry.ranks_per_kind.keys() == {kind}]
    return max((entry for entry in alone if _ranks(entry) > 1), key=_ranks, default=None)


def _of_fewest_kinds(entries: Sequence[MeasuredAllreduce]) -> list[MeasuredAllreduce]:
    fewest = min((len(entry.ranks_per_kind) for entry in entries), default=0)
    return [entry for entry in entries if len(entry.ranks_per_kind) == fewest]


def _ring_scaled(cost: AllreduceCost, ranks_then: int, ranks: int) -> AllreduceCost:
    calls = math.log2(ranks) / math.log2(ranks_then)
    moved = (1 - 1 / ranks) / (1 - 1 / ranks_then)
    return AllreduceCost(cost.latency_sec * calls, cost.sec_per_byte * moved)


def _largest_parts(costs: Sequence[AllreduceCost]) -> AllreduceCost:
    return AllreduceCost(
        max((cost.latency_sec for cost in costs), default=0.0),
        max((cost.sec_per_byte for cost in costs), default=0.0),
    )


def _slowest(entries: Sequence[MeasuredAllreduce], what: str) -> MeasuredAllreduce:
    if not entries:
        raise UserError(
            f"no allreduce was measured from which that of {what} can be estimated; run "
            "kaitian-plan --save again with two ranks of each kind"
        )
    return max(entries, key=lambda entry: _reference_seconds(entry.cost))


def _reference_seconds(cost: AllreduceCost) -> float:
    return cost.seconds(BUCKET_BYTES)


def _ranks(entry: MeasuredAllreduce) -> int:
    return sum(entry.ranks_per_kind.values())


def _names(entry: MeasuredAllreduce) -> str:
    return ", ".join(sorted(entry.ranks_per_kind))
