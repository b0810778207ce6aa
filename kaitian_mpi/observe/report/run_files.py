"""Reads a run's folder: as much of it as there is, and what is missing."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.report.history import read_events, read_groups, read_plans, read_ranks
from kaitian_mpi.observe.report.json_values import (
    DamagedError,
    named_numbers,
    number,
    read_lines,
    read_object,
    text,
    whole,
)
from kaitian_mpi.observe.report.readings import Clock, Metrics, parse_metrics
from kaitian_mpi.observe.report.run import Interval, Rank, Run, describe_facts

_OBJECTS = ("config.json", "topology.json", "benchmark.json", "summary.json")
_MAX_EVENTS = 20_000


@dataclass
class _Files:
    """The content of the folder."""

    objects: dict[str, dict[str, Any]]
    metrics: Metrics
    plans: list[dict[str, Any]]
    events: list[dict[str, Any]]
    missing: list[str]


def read_run(path: Path) -> Run:
    """Read a run's folder; nothing is written there.

    Args:
        path: the folder, of a run that is finished, unfinished, crashed or still training.

    Raises:
        UserError: it is not the folder of a run, or cannot be read.
    """
    _check(path)
    files = _read_files(path)
    config, topology, benchmark, summary = (files.objects[name] for name in _OBJECTS)
    times = [t for line in (*files.events, *files.plans) if (t := number(line.get("time")))]
    starts = [number(e.get("time")) for e in files.events if e.get("kind") in ("start", "resume")]
    found = files.metrics.intervals
    clock = Clock(found, times, [start for start in starts if start is not None])
    plans = read_plans(files.plans, clock)
    ranks = read_ranks(topology, benchmark)
    named = {rank for interval in found for rank in interval.ranks}
    for rank in sorted(named.union(*(plan.ranks for plan in plans))):
        ranks.setdefault(rank, Rank(rank))
    steps = _steps_done(found, files.events)
    if whole(summary.get("steps")) is not None:
        summary = {**summary, "steps": max(steps, whole(summary.get("steps")) or 0)}
    return Run(
        path=path,
        name=text(path.resolve().name) or "run",
        state=_state(summary, files.events),
        emulated=_is_emulated(config, topology, benchmark, summary),
        ranks=ranks,
        groups=read_groups(topology),
        intervals=tuple(replace(each, at_sec=clock.at_step(each.step)) for each in found),
        evaluations=tuple(
            replace(each, at_sec=clock.at(each.at_sec))
            for each in {each.step: each for each in files.metrics.evaluations}.values()
        ),
        plans=plans,
        events=read_events(files.events, clock),
        algorithm=text(summary.get("allreduce")).removeprefix("direct"),
        allreduce_sec={
            name: seconds
            for name, seconds in named_numbers(benchmark.get("allreduce_sec")).items()
            if seconds > 0
        },
        steps=steps,
        facts=describe_facts(config, summary),
        samples_per_sec=number(summary.get("samples_per_sec")),
        training_time_sec=number(summary.get("training_time_sec")),
        missing=files.missing,
    )


def _steps_done(intervals: Sequence[Interval], events: Sequence[dict[str, Any]]) -> int:
    """Return how many steps are done: a signal may end a job some steps after its last reading."""
    known = [intervals[-1].step] if intervals else [0]
    known += [whole(event.get("step")) or 0 for event in events[-1:]]
    return max(known)


def _check(path: Path) -> None:
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        raise UserError(f"{path}: no such folder; name the folder of a run") from None
    except NotADirectoryError:
        raise UserError(f"{path}: this is a file; name the folder of a run") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name a folder that can be read") from error
    if not names & {*_OBJECTS, "metrics.jsonl", "events.jsonl", "plan.jsonl"}:
        raise UserError(
            f"{path}: this is not the folder of a run, as it has no config.json or metrics.jsonl; "
            "name the folder that was given as --run-dir"
        )


def _read_files(path: Path) -> _Files:
    missing: list[str] = []
    objects = {}
    for name in _OBJECTS:
        try:
            objects[name] = read_object(path / name)
        except FileNotFoundError:
            objects[name] = {}
            missing.append(f"{name} is missing{_WHY.get(name, '')}")
        except DamagedError as error:
            objects[name] = {}
            missing.append(f"{name} cannot be read: {error}")
    metrics = Metrics()
    try:
        metrics = parse_metrics(read_lines(path / "metrics.jsonl"))
    except FileNotFoundError:
        missing.append("metrics.jsonl is missing: nothing was measured yet")
    except DamagedError as error:
        missing.append(f"metrics.jsonl cannot be read: {error}")
    else:
        if metrics.damaged_lines:
            missing.append(_damaged("metrics.jsonl", metrics.damaged_lines, metrics.lines))
        if not metrics.intervals:
            missing.append("metrics.jsonl has no reading yet")
    plans = _lines(path, "plan.jsonl", missing)
    events = _lines(path, "events.jsonl", missing)
    return _Files(objects, metrics, plans, events, missing)


_WHY = {
    "benchmark.json": ": the ranks were not benchmarked, or their costs were remembered",
    "summary.json": ": the run has not finished an epoch",
}


def _lines(path: Path, name: str, missing: list[str]) -> list[dict[str, Any]]:
    first: list[dict[str, Any]] = []
    last: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS // 2)
    damaged = total = 0
    try:
        for line in read_lines(path / name):
            total += 1
            if line is None:
                damaged += 1
            elif len(first) < _MAX_EVENTS // 2:
                first.append(line)
            else:
                last.append(line)
    except FileNotFoundError:
        missing.append(f"{name} is missing")
    except DamagedError as error:
        missing.append(f"{name} cannot be read: {error}")
    if damaged:
        missing.append(_damaged(name, damaged, total))
    found = [*first, *last]
    if total - damaged > len(found):
        left_out = total - damaged - len(found)
        missing.append(f"{name}: {left_out:,} of {total:,} lines, in the middle, are left out")
    return found


def _damaged(name: str, damaged: int, total: int) -> str:
    return f"{name}: {damaged:,} of {total:,} lines could not be read"


def _state(summary: dict[str, Any], events: Sequence[dict[str, Any]]) -> str:
    if summary.get("finished") is True:
        return "finished"
    return "stopped" if events and events[-1].get("kind") == "stop" else "unfinished"


def _is_emulated(
    config: dict[str, Any],
    topology: dict[str, Any],
    benchmark: dict[str, Any],
    summary: dict[str, Any],
) -> bool:
    """Return whether any of the files says that devices or speeds are emulated."""
    ranks = topology.get("ranks")
    infos = [info for info in ranks if isinstance(info, dict)] if isinstance(ranks, list) else []
    return (
        any(content.get("emulated") is True for content in (summary, benchmark, *infos))
        or any(text(config.get(name)) for name in ("emulate_kinds", "emulate_slowdown"))
    )  # fmt: skip
