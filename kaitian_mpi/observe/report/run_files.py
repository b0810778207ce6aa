"""Reads the files in a run's folder, and notes which are missing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from kaitian_mpi.config.factory import one_line
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.reading import duration, number_text
from kaitian_mpi.observe.report.run import (
    PHASES,
    Interval,
    PlanChange,
    Rank,
    RecordedEvent,
    RecordedRun,
)

Value = TypeVar("Value")

MAX_POINTS = 150
"""The approximate number of readings shown; longer runs have neighbors merged."""
MAX_EXPERTS = 16
"""The most experts named of a rank, or shown with their tokens."""
_OBJECTS = ("config.json", "topology.json", "benchmark.json", "summary.json")
_LINES = ("metrics.jsonl", "plan.jsonl", "events.jsonl")
_WHY = {
    "benchmark.json": ": the ranks were not benchmarked, or their costs were remembered",
    "summary.json": ": the run has not finished an epoch",
    "metrics.jsonl": ": nothing was measured yet",
}


def read_run(path: Path) -> RecordedRun:
    """Read a run's folder; nothing is written there.

    Raises:
        UserError: it is not the folder of a run, or cannot be read.
    """
    _check(path)
    try:
        return _read(path)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: its files were not written by kaitian-mpi ({one_line(error)}); name the "
            "folder of a run"
        ) from error


def _read(path: Path) -> RecordedRun:
    missing: list[str] = []
    config, topology, benchmark, summary = (_object(path / name, missing) for name in _OBJECTS)
    intervals, evaluations = _read_metrics(_lines(path / _LINES[0], _measured, missing))
    plans = list(_lines(path / _LINES[1], _plan, missing))
    events = list(_lines(path / _LINES[2], _event, missing))
    if not intervals and not any(reason.startswith("metrics") for reason in missing):
        missing.append("metrics.jsonl has no reading yet")
    # A signal may end a job some steps after its last reading.
    last = [event.step for event in events[-1:]] + [interval.step for interval in intervals[-1:]]
    steps = max([0, summary.get("steps", 0), *last])
    state = "stopped" if events and events[-1].kind == "stop" else "unfinished"
    at = _clock(intervals, plans, events)
    plans = [replace(plan, at_sec=at(plan.at_sec)) for plan in plans]
    ranks = _read_ranks(topology)
    trained = {rank for interval in intervals for rank in interval.ranks}
    for rank in sorted(trained.union(*(plan.batch_sizes for plan in plans))):
        ranks.setdefault(rank, Rank(rank))
    return RecordedRun(
        path=path,
        name=path.resolve().name or "run",
        state="finished" if summary.get("finished") is True else state,
        emulated=_is_emulated(config, *topology.get("ranks", []), benchmark, summary),
        ranks=ranks,
        steps=steps,
        intervals=tuple(replace(reading, at_sec=at(reading.at_sec)) for reading in intervals),
        evaluations=evaluations,
        plans=tuple(plans),
        events=tuple(replace(event, at_sec=at(event.at_sec)) for event in events),
        facts=_describe(config, benchmark, {**summary, "steps": steps or None}),
        samples_per_sec=summary.get("samples_per_sec"),
        training_time_sec=summary.get("training_time_sec"),
        missing=missing,
    )


def _check(path: Path) -> None:
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        reasons = {FileNotFoundError: "no such folder", NotADirectoryError: "this is a file"}
        reason = reasons.get(type(error), error.strerror)
        raise UserError(f"{path}: {reason}; name the folder of a run, which can be read") from error
    if not names & {*_OBJECTS, *_LINES}:
        raise UserError(
            f"{path}: this is not the folder of a run, as it has no config.json or metrics.jsonl; "
            "name the folder that was given as --run-dir"
        )


def _parse(content: bytes) -> dict[str, Any]:
    """Parse a JSON object; NaN and infinities in it become None."""
    try:
        parsed = json.loads(content, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise ValueError("not valid JSON") from error
    if not isinstance(parsed, dict):
        raise ValueError("not a JSON object")
    return parsed


def _object(path: Path, missing: list[str]) -> dict[str, Any]:
    try:
        return _parse(path.read_bytes())
    except (OSError, ValueError) as error:
        missing.append(_why(path, error))
        return {}


def _why(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path.name} is missing{_WHY.get(path.name, '')}"
    reason = error.strerror if isinstance(error, OSError) else error
    return f"{path.name} cannot be read: {reason}"


def _lines(
    path: Path, make: Callable[[dict[str, Any]], Value], missing: list[str]
) -> Iterator[Value]:
    """Yield `make` of each line of a file; note how many lines cannot be read."""
    total = 0
    readable = 0
    try:
        with path.open("rb") as file:
            for line in file:
                total += 1
                with suppress(ValueError, LookupError, TypeError):  # a crash may have cut it off
                    value = make(_parse(line))
                    readable += 1
                    yield value
    except OSError as error:
        missing.append(_why(path, error))
    if damaged := total - readable:
        missing.append(f"{path.name}: {damaged:,} of {total:,} lines could not be read")


def _read_metrics(
    lines: Iterable[Interval | tuple[int, dict[str, float]]],
) -> tuple[list[Interval], dict[int, dict[str, float]]]:
    """Return the readings, at Unix times, and the results of evaluations by step."""
    intervals: list[Interval] = []
    evaluations: dict[int, dict[str, float]] = {}
    most = 4 * MAX_POINTS
    for line in lines:
        if not isinstance(line, Interval):
            step, results = line
            evaluations[step] = results
            continue
        steps = line.step - (intervals[-1].step if intervals else 0)
        intervals.append(replace(line, steps=max(1, steps)))
        if len(intervals) >= most:
            intervals = _thin(intervals)
            most = max(most, 2 * len(intervals))
    return _thin(intervals), evaluations


def _measured(line: dict[str, Any]) -> Interval | tuple[int, dict[str, float]]:
    """Return a line's reading, or the step and results of its evaluation."""
    if "validation" in line:
        return int(line["step"]), _known(line["validation"])
    ranks = tuple(line.get("ranks", ()))
    times = {name: tuple(line.get(f"{name}_time_sec") or ()) for name in PHASES}
    if times["forward"]:  # the compute time is the sum of forward, backward and optimizer
        del times["compute"]
    measured_sec = {name: seconds for name, seconds in times.items() if seconds}
    if any(len(ranks) != len(seconds) for seconds in measured_sec.values()):
        raise ValueError("the ranks differ")
    return Interval(
        step=int(line["step"]),
        at_sec=float(line["time"]),
        loss=_number(line.get("loss")),
        samples_per_sec=_number(line.get("samples_per_sec")),
        step_time_sec=_number(line.get("step_time_sec")),
        ranks=ranks,
        batch_sizes=tuple(line.get("batch_sizes", ())),
        phases=measured_sec,
        logged=_known(line.get("logged", {})),
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _known(figures: dict[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items() if value is not None}


def _thin(intervals: Sequence[Interval]) -> list[Interval]:
    """Merge readings that are too short to show, such as those at the end of an epoch."""
    shortest = sum(interval.seconds for interval in intervals) / MAX_POINTS
    merged: list[Interval] = []
    for place, interval in enumerate(intervals):
        is_short_end = place == len(intervals) - 1 and interval.seconds < shortest
        if merged and (merged[-1].seconds < shortest or is_short_end):
            merged[-1:] = _merge(merged[-1], interval)
        else:
            merged.append(interval)
    return merged


def _merge(first: Interval, second: Interval) -> list[Interval]:
    """Return the means over both, weighted by their steps; both if their plans differ."""
    if (first.ranks, first.batch_sizes) != (second.ranks, second.batch_sizes):
        return [first, second]
    if first.phases.keys() != second.phases.keys():
        return [first, second]

    def mean(x: float | None, y: float | None) -> float | None:
        if x is None or y is None:
            return y if x is None else x
        return (first.steps * x + second.steps * y) / (first.steps + second.steps)

    seconds = first.seconds + second.seconds
    samples = [(part.samples_per_sec or 0.0) * part.seconds for part in (first, second)]
    merged = replace(
        second,
        steps=first.steps + second.steps,
        loss=mean(first.loss, second.loss),
        samples_per_sec=sum(samples) / seconds if all(samples) else second.samples_per_sec,
        step_time_sec=mean(first.step_time_sec, second.step_time_sec),
        phases={
            name: tuple(map(mean, first.phases[name], times))
            for name, times in second.phases.items()
        },
        logged={**first.logged, **second.logged},
    )
    return [merged]


def _plan(line: dict[str, Any]) -> PlanChange:
    return PlanChange(
        step=int(line["step"]),
        at_sec=float(line["time"]),
        batch_sizes=dict(zip(line["ranks"], map(int, line["batch_sizes"]), strict=True)),
        reason=str(line["reason"]),
    )


def _event(line: dict[str, Any]) -> RecordedEvent:
    return RecordedEvent(
        kind=str(line["kind"]),
        step=int(line["step"]),
        at_sec=float(line["time"]),
        text=str(line["text"]),
        ranks=tuple(line["ranks"]),
    )


def _clock(
    intervals: Sequence[Interval], plans: Sequence[PlanChange], events: Sequence[RecordedEvent]
) -> Callable[[float], float]:
    """Return a function from Unix time to run time: the seconds in which a job was running."""
    times = sorted(
        [plan.at_sec for plan in plans]
        + [event.at_sec for event in events]
        + [
            time
            for interval in intervals
            for time in (interval.at_sec - interval.seconds, interval.at_sec)
        ]
    )
    starts = {event.at_sec for event in events if event.kind in ("start", "resume")}
    pauses = [(now, now - before) for before, now in itertools.pairwise(times) if now in starts]

    def at(time: float) -> float:
        paused = sum(length for start, length in pauses if start <= time)
        return max(0.0, time - times[0] - paused)

    return at


def _read_ranks(topology: dict[str, Any]) -> dict[int, Rank]:
    leaders = {group["leader"] for group in topology.get("groups", [])}
    ranks = [
        Rank(
            info["world_rank"],
            host=info["host"],
            kind=info["kind"],
            device=info.get("device_name") or info.get("device", ""),
            library=info.get("library", ""),
            emulated=info.get("emulated", False),
            is_leader=info["world_rank"] in leaders,
        )
        for info in topology.get("ranks", [])
    ]
    return {rank.rank: rank for rank in ranks}


def _is_emulated(config: dict[str, Any], *others: dict[str, Any]) -> bool:
    is_requested = config.get("emulate_kinds") or config.get("emulate_slowdown")
    return bool(is_requested) or any(content.get("emulated") is True for content in others)


def _experts(summary: dict[str, Any]) -> dict[str, str]:
    """Return what is known of experts that different ranks hold."""
    experts = summary.get("experts") or {}
    ranks = summary.get("ranks") or []
    held = experts.get("by_rank") or []
    names = sorted(itertools.chain(*held), key=lambda name: [*map(int, name.split("."))])
    fractions = experts.get("token_fractions") or []
    hidden = experts.get("hidden_by_rank") or []
    by_rank = zip(ranks, held, strict=False)
    by_expert = list(zip(names, fractions, strict=False))
    shown = by_expert[:MAX_EXPERTS]
    more = len(by_expert) - len(shown)
    return {
        "experts by rank": "; ".join(
            f"rank {rank}: {_in_short(part) if part else 'none'}" for rank, part in by_rank
        ),
        "tokens by expert": ", ".join(f"{name}: {share:.0%}" for name, share in shown)
        + (f" and {more} more" if more else ""),
        "exchange of tokens hidden": ", ".join(
            f"rank {rank}: {part:.0%}"
            for rank, part in zip(ranks, hidden, strict=False)
            if part is not None
        ),
    }


def _in_short(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_EXPERTS])
    return shown if len(names) <= MAX_EXPERTS else f"{shown} and {len(names) - MAX_EXPERTS} more"


def _describe(
    config: dict[str, Any], benchmark: dict[str, Any], summary: dict[str, Any]
) -> dict[str, str]:
    def shown(name: str, form: str = "{:,.0f}", scale: float = 1.0) -> str:
        value = summary.get(name)
        return "" if value is None else form.format(scale * value)

    model = config.get("model")
    data = config.get("dataset")
    epochs = shown("epochs")
    planned_epochs = config.get("epochs")
    of_planned = f" of {planned_epochs:,}" if planned_epochs else ""
    times = sorted(benchmark.get("allreduce_sec", {}).items(), key=lambda item: item[1])
    facts = {
        "trained": config.get("task") or (f"{model} on {data}" if model and data else model),
        "ranks that train": shown("world_size"),
        "steps": shown("steps"),
        "epochs": epochs + of_planned if epochs else "",
        "global batch": shown("global_batch_size", "{:,.0f} samples per step"),
        "rate": shown("samples_per_sec", "{:,.1f} samples/s"),
        "mean step": shown("step_time_sec", "{:,.1f} ms", 1e3),
        "training time": duration(summary.get("training_time_sec")),
        "allreduce between device kinds": summary.get("allreduce", "").removeprefix("direct"),
        "measured allreduce times": ", ".join(
            f"{name} {number_text(1e3 * sec, 3)} ms" for name, sec in times
        ),
        "gradients between hosts": summary.get("wire"),
        "parity of device kinds": "yes" if summary.get("parity") else "",
        "balance": config.get("balance"),
        "precision": config.get("precision"),
        **_experts(summary),
        "torch": summary.get("torch_version"),
        "skipped steps": shown("bad_steps").removeprefix("0"),
    }
    for name, value in list(_known(summary.get("validation", {})).items())[:8]:
        facts[f"held-out {name}"] = f"{value:.4g}"
    return {name: value for name, value in facts.items() if value}
