"""Who took part in a run, and what happened: plans, losses, slow ranks, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kaitian_mpi.observe.report.json_values import MAX_TEXT, number, objects, text, whole, wholes
from kaitian_mpi.observe.report.readings import Clock
from kaitian_mpi.observe.report.run import Event, Group, PlanChange, Rank

_ENDS = {"slow_end": "slow", "recovery": "loss"}


def read_ranks(topology: dict[str, Any], benchmark: dict[str, Any]) -> dict[int, Rank]:
    """Return the ranks of topology.json by number, with the slowdowns of benchmark.json."""
    slowdowns = {
        whole(info.get("rank")): text(info.get("emulated_slowdown"))
        for info in objects(benchmark.get("ranks"))
    }
    found: dict[int, Rank] = {}
    for info in objects(topology.get("ranks")):
        rank = whole(info.get("world_rank"))
        if rank is not None:
            found[rank] = Rank(
                rank,
                text(info.get("host")),
                text(info.get("kind")),
                text(info.get("device")),
                text(info.get("device_name")),
                text(info.get("library")),
                info.get("emulated") is True,
                slowdowns.get(rank, ""),
            )
    return dict(sorted(found.items()))


def read_groups(topology: dict[str, Any]) -> tuple[Group, ...]:
    """Return the groups of topology.json."""
    return tuple(
        Group(text(info.get("kind")), members, whole(info.get("leader")))
        for info in objects(topology.get("groups"))
        if (members := wholes(info.get("ranks")))
    )


def read_plans(lines: Sequence[dict[str, Any]], clock: Clock) -> tuple[PlanChange, ...]:
    """Return the plans of plan.jsonl by step.

    Args:
        lines: the objects in the file.
        clock: the run's time.
    """
    found: list[PlanChange] = []
    for line in lines:
        step, sizes = whole(line.get("step")), wholes(line.get("batch_sizes"))
        ranks, time = wholes(line.get("ranks")), number(line.get("time"))
        if step is None or time is None or not ranks or not sizes or len(ranks) != len(sizes):
            continue
        # A run that resumes from an earlier step plans again from there.
        while found and found[-1].step > step:
            found.pop()
        reason = text(line.get("reason"), MAX_TEXT)
        found.append(
            PlanChange(
                step=step, at_sec=clock.at(time), ranks=ranks, batch_sizes=sizes, reason=reason
            )
        )
    return tuple(found)


def read_events(lines: Sequence[dict[str, Any]], clock: Clock) -> tuple[Event, ...]:
    """Return the events of events.jsonl by time; the end of a slow period or a loss is part of it.

    Args:
        lines: the objects in the file.
        clock: the run's time.
    """
    found: list[Event] = []
    for line in lines:
        kind, step, time = text(line.get("kind")), whole(line.get("step")), number(line.get("time"))
        if not kind or step is None or time is None:
            continue
        at, details = clock.at(time), line.get("details")
        since = whole(details.get("since_step")) if isinstance(details, dict) else None
        if kind == "slow" and since is not None:  # it is noticed some steps later
            step, at = since, clock.at_step(since)
        event = Event(
            kind=kind,
            step=step,
            at_sec=at,
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
    return tuple(sorted(found, key=lambda event: event.at_sec))


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
