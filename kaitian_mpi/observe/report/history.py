"""Who took part in a run, and what happened: plans, losses, slow ranks, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kaitian_mpi.observe.report.json_values import MAX_TEXT, number, objects, text, whole, wholes
from kaitian_mpi.observe.report.readings import Clock
from kaitian_mpi.observe.report.run import Event, Group, PlanChange, Rank

_ENDS = {"slow_end": "slow", "recovery": "loss"}
MAX_RANKS = 1 << 17


def read_ranks(topology: dict[str, Any], benchmark: dict[str, Any]) -> dict[int, Rank]:
    """Return the ranks of topology.json, or else of benchmark.json, by number."""
    slowdowns = {
        rank: text(info.get("emulated_slowdown"))
        for info in objects(benchmark.get("ranks"))
        if (rank := whole(info.get("rank"))) is not None
    }
    found: dict[int, Rank] = {}
    for info in objects(topology.get("ranks")) or objects(benchmark.get("ranks")):
        rank = whole(info.get("world_rank", info.get("rank")))
        if rank is not None and rank < MAX_RANKS:
            found[rank] = Rank(
                rank,
                text(info.get("host")),
                text(info.get("kind", info.get("device_kind"))),
                text(info.get("device")),
                text(info.get("device_name")),
                text(info.get("library")),
                info.get("emulated") is True,
                slowdowns.get(rank, ""),
            )
    return dict(sorted(found.items()))


def read_groups(topology: dict[str, Any], ranks: Mapping[int, Rank]) -> tuple[Group, ...]:
    """Return the groups of topology.json, or else the ranks by kind."""
    found = []
    for info in objects(topology.get("groups")):
        members = wholes(info.get("ranks"))
        if members:
            leader = whole(info.get("leader"))
            found.append(Group(text(info.get("kind")), tuple(sorted(set(members))), leader))
    if found:
        return tuple(found)
    kinds = dict.fromkeys(rank.kind for rank in ranks.values())
    return tuple(
        Group(kind, tuple(r.rank for r in ranks.values() if r.kind == kind), None) for kind in kinds
    )


class Membership:
    """The ranks that train, for files whose lines do not name them."""

    def __init__(
        self,
        ranks: Mapping[int, Rank],
        summary: dict[str, Any],
        events: Sequence[dict[str, Any]],
    ) -> None:
        """Find out who was lost when."""
        self._known = ranks
        excluded = {whole(entry.get("rank")) for entry in objects(summary.get("excluded"))}
        self._first = tuple(rank for rank in ranks if rank not in excluded)
        self._last = wholes(summary.get("ranks")) or ()
        self._losses: list[tuple[int, set[int]]] = []
        for failure in objects(summary.get("failures")):
            lost = {whole(entry.get("rank")) for entry in objects(failure.get("ranks"))}
            step = whole(failure.get("step"))
            if step is not None:
                self._losses.append((step, {rank for rank in lost if rank is not None}))
        for event in events:
            step = whole(event.get("step"))
            if event.get("kind") == "loss" and step is not None:
                self._losses.append((step, set(wholes(event.get("ranks")) or ())))

    def at(self, step: int, size: int) -> tuple[int, ...]:
        """Return the `size` ranks that trained a step; numbered from 0 if that is not known."""
        lost = set().union(*(ranks for at, ranks in self._losses if at < step))
        candidates = [tuple(r for r in self._first if r not in lost), self._first, self._last]
        found = next((ranks for ranks in candidates if len(ranks) == size), None)
        return tuple(range(size)) if found is None else found

    def complete(self, numbers: Iterable[int]) -> dict[int, Rank]:
        """Return the known ranks, and those of which nothing but the number is known."""
        found = dict(self._known)
        for rank in numbers:
            found.setdefault(rank, Rank(rank))
        return dict(sorted(found.items()))


def read_plans(
    lines: Sequence[dict[str, Any]],
    events: Sequence[dict[str, Any]],
    members: Membership,
    clock: Clock,
) -> tuple[PlanChange, ...]:
    """Return the plans of plan.jsonl, or else of events.jsonl, by step.

    Args:
        lines: of plan.jsonl.
        events: of events.jsonl.
        members: for lines that do not name the ranks.
        clock: the run's time.
    """
    found: list[PlanChange] = []
    for line in lines or [_as_line(event) for event in events if event.get("kind") == "plan"]:
        step, sizes = whole(line.get("step")), wholes(line.get("batch_sizes"))
        if step is None or not sizes:
            continue
        # A run that resumes from an earlier step plans again from there.
        while found and found[-1].step > step:
            found.pop()
        ranks = wholes(line.get("ranks"))
        if not ranks or len(ranks) != len(sizes) or len(set(ranks)) < len(ranks):
            ranks = members.at(step + 1, len(sizes))
        at = clock.at(number(line.get("time")))
        found.append(
            PlanChange(
                step=step,
                at_sec=clock.at_step(step) if at is None else at,
                ranks=ranks,
                batch_sizes=sizes,
                reason=text(line.get("reason"), MAX_TEXT),
                predicted_gain=number(line.get("predicted_gain")),
            )
        )
    return tuple(found)


def _as_line(event: dict[str, Any]) -> dict[str, Any]:
    details = event.get("details")
    details = details if isinstance(details, dict) else {}
    return {"ranks": event.get("ranks"), "reason": event.get("text"), **details} | {
        "step": event.get("step"),
        "time": event.get("time"),
    }


def find_events(
    lines: Sequence[dict[str, Any]], summary: dict[str, Any], clock: Clock
) -> tuple[Event, ...]:
    """Return the events, by time, of events.jsonl, or of summary.json for folders without it.

    Args:
        lines: the objects in events.jsonl.
        summary: the content of summary.json.
        clock: the run's time.
    """
    found = _from_lines(lines, clock) or _from_summary(summary, clock)
    return tuple(sorted(found, key=lambda event: event.at_sec))


def _from_lines(lines: Sequence[dict[str, Any]], clock: Clock) -> list[Event]:
    found: list[Event] = []
    for line in lines:
        kind, step = text(line.get("kind")), whole(line.get("step"))
        if not kind or step is None:
            continue
        at = clock.at(number(line.get("time")))
        details = line.get("details")
        since = whole(details.get("since_step")) if isinstance(details, dict) else None
        if kind == "slow" and since is not None:  # it is noticed some steps later
            step, at = since, clock.at_step(since)
        event = Event(
            kind=kind,
            step=step,
            at_sec=clock.at_step(step) if at is None else at,
            text=text(line.get("text"), MAX_TEXT),
            ranks=wholes(line.get("ranks")) or (),
        )
        if kind in _ENDS and _end(found, event):
            continue
        # After a loss, ranks that are still slow are named again.
        if kind == "slow" or (kind == "loss" and event.ranks):
            while _end(found, replace(event, kind="slow_end")):
                pass
        found.append(event)
    return found


def _end(found: list[Event], end: Event) -> bool:
    """Note when a slow period or a loss ended; return False if none had begun."""
    for i in reversed(range(len(found))):
        begun = found[i]
        # A recovery may name the ranks that continue instead of those that were lost.
        is_same = end.kind == "recovery" or not end.ranks or set(begun.ranks) & set(end.ranks)
        if begun.kind == _ENDS[end.kind] and begun.until_sec is None and is_same:
            found[i] = replace(begun, until_step=end.step, until_sec=end.at_sec)
            return True
    return False


def _from_summary(summary: dict[str, Any], clock: Clock) -> list[Event]:
    found = []
    for slow in objects(summary.get("slow_ranks")):
        rank, since = whole(slow.get("rank")), whole(slow.get("since_step"))
        if rank is None or since is None:
            continue
        until = whole(slow.get("until_step"))
        found.append(
            Event(
                kind="slow",
                step=since,
                at_sec=clock.at_step(since),
                text=f"rank {rank} is slow: {text(slow.get('text'), MAX_TEXT)}",
                ranks=(rank,),
                until_step=until,
                until_sec=None if until is None else clock.at_step(until),
            )
        )
    for failure in objects(summary.get("failures")):
        step = whole(failure.get("step"))
        ranks = [whole(entry.get("rank")) for entry in objects(failure.get("ranks"))]
        lost = tuple(rank for rank in ranks if rank is not None)
        if step is None or not lost:
            continue
        at, seconds = clock.at_step(step), number(failure.get("seconds_to_recover"))
        took = "" if seconds is None else f", {seconds:.2f} s to recover"
        names = ", ".join(map(str, lost))
        found.append(
            Event(
                kind="loss",
                step=step,
                at_sec=at,
                text=f"rank{'s' * (len(lost) > 1)} {names} lost{took}",
                ranks=lost,
                until_step=None if seconds is None else step + 1,
                until_sec=None if seconds is None else at + seconds,
            )
        )
    return found
