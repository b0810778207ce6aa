"""Reads a run's folder: as much of it as there is, and what is missing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.report.history import (
    MAX_RANKS,
    Membership,
    find_events,
    read_groups,
    read_plans,
    read_ranks,
)
from kaitian_mpi.observe.report.json_values import (
    DamagedError,
    named_numbers,
    number,
    read_lines,
    read_object,
    text,
    whole,
)
from kaitian_mpi.observe.report.readings import Clock, Metrics, Reading, parse_metrics
from kaitian_mpi.observe.report.run import Evaluation, Interval, Run, describe_facts

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
    ranks = read_ranks(topology, benchmark)
    members = Membership(ranks, summary, files.events)
    times = [t for line in (*files.events, *files.plans) if (t := number(line.get("time")))]
    starts = [number(e.get("time")) for e in files.events if e.get("kind") in ("start", "resume")]
    readings = files.metrics.readings
    clock = Clock(readings, times, [start for start in starts if start is not None])
    plans = read_plans(files.plans, files.events, members, clock)
    if readings and not any(reading.phases for reading in readings):
        files.missing.append("metrics.jsonl has no times of the ranks")
    steps = _steps_done(readings, files.events)
    if whole(summary.get("steps")) is not None:
        summary = {**summary, "steps": max(steps, whole(summary.get("steps")) or 0)}
    return Run(
        path=path,
        name=text(path.resolve().name) or "run",
        state=_state(summary, files.events),
        emulated=_is_emulated(config, topology, benchmark, summary),
        ranks=members.complete([*_named(readings), *(rank for p in plans for rank in p.ranks)]),
        groups=read_groups(topology, ranks),
        intervals=tuple(_interval(reading, members, clock) for reading in readings),
        evaluations=_evaluations(files.metrics, summary, clock),
        plans=plans,
        events=find_events(files.events, summary, clock),
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
        has_times=clock.has_times,
        missing=files.missing,
    )


def _steps_done(readings: Sequence[Reading], events: Sequence[dict[str, Any]]) -> int:
    """Return how many steps are done: a signal may end a job some steps after its last reading."""
    known = [readings[-1].step] if readings else [0]
    known += [whole(event.get("step")) or 0 for event in events[-1:]]
    return max(known)


def _check(path: Path) -> None:
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        raise UserError(f"{path}: found no such folder, needed the folder of a run") from None
    except NotADirectoryError:
        raise UserError(f"{path}: found a file, needed the folder of a run") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; needed a folder that can be read") from error
    if not names & {*_OBJECTS, "metrics.jsonl", "events.jsonl", "plan.jsonl"}:
        raise UserError(
            f"{path}: found no file of a run, needed the folder that --run-dir named, with "
            "config.json and metrics.jsonl"
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
    metrics = Metrics([], [], 0, 0)
    try:
        metrics = parse_metrics(read_lines(path / "metrics.jsonl"))
    except FileNotFoundError:
        missing.append("metrics.jsonl is missing: nothing was measured yet")
    except DamagedError as error:
        missing.append(f"metrics.jsonl cannot be read: {error}")
    else:
        if metrics.damaged_lines:
            missing.append(_damaged("metrics.jsonl", metrics.damaged_lines, metrics.lines))
        if not metrics.readings:
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


def _named(readings: Iterable[Reading]) -> list[int]:
    return sorted({rank for reading in readings for rank in reading.ranks if rank < MAX_RANKS})


def _interval(reading: Reading, members: Membership, clock: Clock) -> Interval:
    return Interval(
        step=reading.step,
        steps=reading.steps,
        at_sec=clock.at_step(reading.step),
        total_steps=reading.total_steps,
        epoch=reading.epoch,
        loss=reading.loss,
        learning_rate=reading.learning_rate,
        samples_per_sec=reading.samples_per_sec,
        step_time_sec=reading.step_time_sec,
        ranks=reading.ranks or members.at(reading.step, reading.size),
        batch_sizes=reading.batch_sizes,
        phases=reading.phases,
        logged=reading.logged,
    )


def _evaluations(metrics: Metrics, summary: dict[str, Any], clock: Clock) -> tuple[Evaluation, ...]:
    """Return all held-out results; folders of earlier versions have the last one alone."""
    found: dict[int, Evaluation] = {}
    for evaluation, time in metrics.evaluations:
        at = clock.at(time)
        at = clock.at_step(evaluation.step) if at is None else at
        found[evaluation.step] = replace(evaluation, at_sec=at)
    step, values = whole(summary.get("steps")), named_numbers(summary.get("validation"))
    if not found and step is not None and values:
        found[step] = Evaluation(step=step, at_sec=clock.at_step(step), values=values)
    return tuple(found[step] for step in sorted(found))
