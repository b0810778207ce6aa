"""Reads a run's folder: as much of it as there is, and what is missing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.reading import duration
from kaitian_mpi.observe.report.json_values import (
    MAX_TEXT,
    named_numbers,
    number,
    objects,
    read_lines,
    read_object,
    text,
    whole,
    wholes,
)
from kaitian_mpi.observe.report.run import (
    PHASES,
    Event,
    Interval,
    PlanChange,
    Rank,
    Run,
)

MAX_POINTS = 150
"""About how many readings are shown; of longer runs, neighbors are merged."""
_OBJECTS = ("config.json", "topology.json", "benchmark.json", "summary.json")
_LINES = ("metrics.jsonl", "plan.jsonl", "events.jsonl")
_WHY = {
    "benchmark.json": ": the ranks were not benchmarked, or their costs were remembered",
    "summary.json": ": the run has not finished an epoch",
    "metrics.jsonl": ": nothing was measured yet",
}

_Lines = Iterable[dict[str, Any]]


def read_run(path: Path) -> Run:
    """Read a run's folder; nothing is written there.

    Raises:
        UserError: it is not the folder of a run, or cannot be read.
    """
    _check(path)
    missing: list[str] = []
    config, topology, benchmark, summary = (_object(path / name, missing) for name in _OBJECTS)
    measured, planned, happened = (_lines(path / name, missing) for name in _LINES)
    intervals, evaluations = _read_metrics(measured)
    plan_lines, event_lines = list(planned), list(happened)
    if not intervals and not any(reason.startswith("metrics") for reason in missing):
        missing.append("metrics.jsonl has no reading yet")
    clock = _Clock(intervals, [*plan_lines, *event_lines])
    plans, events = _read_plans(plan_lines, clock), _read_events(event_lines, clock)
    ranks = _read_ranks(topology)
    trained = {rank for each in intervals for rank in each.ranks}
    for rank in sorted(trained.union(*(plan.batch_sizes for plan in plans))):
        ranks.setdefault(rank, Rank(rank))
    # A signal may end a job some steps after its last reading.
    last = [event["step"] for event in event_lines[-1:]] + [i.step for i in intervals[-1:]]
    steps = max([0, whole(summary.get("steps")) or 0, *last])
    state = "stopped" if events and event_lines[-1].get("kind") == "stop" else "unfinished"
    return Run(
        path=path,
        name=text(path.resolve().name) or "run",
        state="finished" if summary.get("finished") is True else state,
        emulated=_is_emulated(config, topology, benchmark, summary),
        ranks=ranks,
        steps=steps,
        intervals=tuple(replace(each, at_sec=clock.at(each.at_sec)) for each in intervals),
        evaluations=evaluations,
        plans=plans,
        events=events,
        facts=_describe(config, benchmark, {**summary, "steps": steps or None}),
        samples_per_sec=number(summary.get("samples_per_sec")),
        training_time_sec=number(summary.get("training_time_sec")),
        missing=missing,
    )


def _check(path: Path) -> None:
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        found = {FileNotFoundError: "no such folder", NotADirectoryError: "this is a file"}
        reason = found.get(type(error), error.strerror)
        raise UserError(f"{path}: {reason}; name the folder of a run, which can be read") from error
    if not names & {*_OBJECTS, *_LINES}:
        raise UserError(
            f"{path}: this is not the folder of a run, as it has no config.json or metrics.jsonl; "
            "name the folder that was given as --run-dir"
        )


def _object(path: Path, missing: list[str]) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        missing.append(_why(path, error))
        return {}


def _why(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path.name} is missing{_WHY.get(path.name, '')}"
    reason = error.strerror if isinstance(error, OSError) else error
    return f"{path.name} cannot be read: {reason}"


def _lines(path: Path, missing: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file that have a step and a time; note what cannot be read."""
    damaged = total = 0
    try:
        for line in read_lines(path):
            total += 1
            if line is None or whole(line.get("step")) is None or number(line.get("time")) is None:
                damaged += 1
            else:
                yield line
    except (OSError, ValueError) as error:
        missing.append(_why(path, error))
    if damaged:
        missing.append(f"{path.name}: {damaged:,} of {total:,} lines could not be read")


def _read_metrics(lines: _Lines) -> tuple[list[Interval], dict[int, dict[str, float]]]:
    """Return the readings, at Unix times, and the results of evaluations by step."""
    intervals: list[Interval] = []
    evaluations: dict[int, dict[str, float]] = {}
    most = 4 * MAX_POINTS
    for line in lines:
        step = line["step"]
        if values := named_numbers(line.get("validation")):
            evaluations[step] = values
        if "validation" in line:
            continue
        # What a resume has trained again replaces what came before.
        while intervals and intervals[-1].step >= step:
            intervals.pop()
        steps = step - (intervals[-1].step if intervals else 0)
        intervals.append(_reading(line, max(1, steps)))
        if len(intervals) >= most:
            intervals = _thin(intervals)
            most = max(most, 2 * len(intervals))
    return _thin(intervals), evaluations


def _reading(line: dict[str, Any], steps: int) -> Interval:
    ranks = wholes(line.get("ranks"))
    if len(set(ranks)) < len(ranks):
        ranks = ()
    phases = {}
    for name in PHASES:
        values = line.get(f"{name}_time_sec")
        if isinstance(values, list) and len(values) == len(ranks) > 0:
            phases[name] = tuple(map(number, values))
    # The compute time is the sum of these three, of which all or none are measured.
    for name in ("compute",) if "forward" in phases else ("forward", "backward", "optimizer"):
        phases.pop(name, None)
    batch_sizes = wholes(line.get("batch_sizes"))
    step_time = number(line.get("step_time_sec"))
    return Interval(
        step=line["step"],
        steps=steps,
        at_sec=line["time"],
        loss=number(line.get("loss")),
        samples_per_sec=number(line.get("samples_per_sec")),
        step_time_sec=step_time if step_time and step_time > 0 else None,
        ranks=ranks,
        batch_sizes=batch_sizes if len(batch_sizes) == len(ranks) else (),
        phases=phases,
        logged=named_numbers(line.get("logged")),
    )


def _thin(intervals: Sequence[Interval]) -> list[Interval]:
    """Merge readings that are too short to show, such as those at the end of an epoch."""
    least = sum(each.seconds for each in intervals) / MAX_POINTS
    found: list[Interval] = []
    for place, each in enumerate(intervals):
        is_last = place == len(intervals) - 1
        if found and (found[-1].seconds < least or (is_last and each.seconds < least)):
            found[-1:] = _merge(found[-1], each)
        else:
            found.append(each)
    return found


def _merge(first: Interval, second: Interval) -> list[Interval]:
    """Return the means over both, weighted by their steps; both if their plans differ."""
    plans = [(each.ranks, each.batch_sizes, each.phases.keys()) for each in (first, second)]
    if plans[0] != plans[1]:
        return [first, second]

    def mean(x: float | None, y: float | None) -> float | None:
        if x is None or y is None:
            return y if x is None else x
        return (first.steps * x + second.steps * y) / (first.steps + second.steps)

    seconds = first.seconds + second.seconds
    samples = [(each.samples_per_sec or 0.0) * each.seconds for each in (first, second)]
    merged = replace(
        second,
        steps=first.steps + second.steps,
        loss=mean(first.loss, second.loss),
        samples_per_sec=sum(samples) / seconds if all(samples) else second.samples_per_sec,
        step_time_sec=mean(first.step_time_sec, second.step_time_sec),
        phases={n: tuple(map(mean, first.phases[n], times)) for n, times in second.phases.items()},
        logged={**first.logged, **second.logged},
    )
    return [merged]


class _Clock:
    """The seconds since the run's start, without the time in which no job ran."""

    def __init__(self, intervals: Sequence[Interval], lines: _Lines) -> None:
        begun = [(each.at_sec - each.seconds, each.at_sec) for each in intervals]
        known = sorted([*(time for pair in begun for time in pair), *(x["time"] for x in lines)])
        self._zero = known[0] if known else 0.0
        starts = {x["time"] for x in lines if x.get("kind") in ("start", "resume")}
        pairs = itertools.pairwise(known)
        self._pauses = [(start, start - before) for before, start in pairs if start in starts]

    def at(self, time: float) -> float:
        """Return a Unix time in seconds since the start."""
        paused = sum(length for start, length in self._pauses if start <= time)
        return max(0.0, time - self._zero - paused)


def _read_ranks(topology: dict[str, Any]) -> dict[int, Rank]:
    leaders = {whole(group.get("leader")) for group in objects(topology.get("groups"))}
    found: dict[int, Rank] = {}
    for info in objects(topology.get("ranks")):
        rank = whole(info.get("world_rank"))
        if rank is not None:
            found[rank] = Rank(
                rank,
                host=text(info.get("host")),
                kind=text(info.get("kind")),
                device=text(info.get("device_name")) or text(info.get("device")),
                library=text(info.get("library")),
                emulated=info.get("emulated") is True,
                is_leader=rank in leaders,
            )
    return dict(sorted(found.items()))


def _read_plans(lines: _Lines, clock: _Clock) -> tuple[PlanChange, ...]:
    found: list[PlanChange] = []
    for line in lines:
        ranks, sizes = wholes(line.get("ranks")), wholes(line.get("batch_sizes"))
        if not ranks or len(ranks) != len(sizes):
            continue
        # A run that resumes from an earlier step plans again from there.
        while found and found[-1].step > line["step"]:
            found.pop()
        found.append(
            PlanChange(
                step=line["step"],
                at_sec=clock.at(line["time"]),
                batch_sizes=dict(zip(ranks, sizes, strict=True)),
                reason=text(line.get("reason"), MAX_TEXT),
            )
        )
    return tuple(found)


def _read_events(lines: _Lines, clock: _Clock) -> tuple[Event, ...]:
    """Return the events by time; the end of a slow period is part of it."""
    found: list[Event] = []
    slow: dict[int, Event] = {}
    for line in lines:
        event = Event(
            kind=text(line.get("kind")),
            step=line["step"],
            at_sec=clock.at(line["time"]),
            text=text(line.get("text"), MAX_TEXT),
            ranks=wholes(line.get("ranks")),
        )
        if event.kind in ("slow", "slow_end", "loss"):
            # After a loss, ranks that are still slow are named again.
            for rank in event.ranks:
                if before := slow.pop(rank, None):
                    before.until_sec = event.at_sec
        if event.kind == "slow":
            slow |= dict.fromkeys(event.ranks, event)
        if event.kind and event.kind != "slow_end":
            found.append(event)
    return tuple(sorted(found, key=lambda event: event.at_sec))


def _is_emulated(config: dict[str, Any], topology: dict[str, Any], *others: Any) -> bool:
    """Return whether any of the files says that devices or speeds are emulated."""
    contents = [*others, *objects(topology.get("ranks"))]
    return any(content.get("emulated") is True for content in contents) or any(
        text(config.get(name)) for name in ("emulate_kinds", "emulate_slowdown")
    )


def _describe(
    config: dict[str, Any], benchmark: dict[str, Any], summary: dict[str, Any]
) -> dict[str, str]:
    """Return what the files say of the whole run, by name; only what is known."""

    def shown(name: str, form: str = "{:,.0f}", scale: float = 1.0) -> str:
        value = number(summary.get(name))
        return "" if value is None else form.format(scale * value)

    model, data = text(config.get("model")), text(config.get("dataset"))
    wanted = whole(config.get("epochs"))
    startup = named_numbers(summary.get("startup_sec"))
    allreduce: Mapping[str, float] = named_numbers(benchmark.get("allreduce_sec"))
    times = sorted(allreduce.items(), key=lambda item: item[1])
    facts = {
        "trained": text(config.get("task")) or (f"{model} on {data}" if model and data else model),
        "ranks that train": shown("world_size"),
        "steps": shown("steps"),
        "epochs": shown("epochs") and shown("epochs") + (f" of {wanted:,}" if wanted else ""),
        "global batch": shown("global_batch_size", "{:,.0f} samples per step"),
        "rate": shown("samples_per_sec", "{:,.1f} samples/s"),
        "mean step": shown("step_time_sec", "{:,.1f} ms", 1e3),
        "training time": duration(number(summary.get("training_time_sec"))),
        "start-up": duration(sum(startup.values())) if startup else "",
        "allreduce between device kinds": text(summary.get("allreduce")).removeprefix("direct"),
        "measured allreduce times": ", ".join(f"{name} {1e3 * sec:.3g} ms" for name, sec in times),
        "gradients between hosts": text(summary.get("wire")),
        "parity of device kinds": "yes" if summary.get("parity") is True else "",
        "balance": text(config.get("balance")),
        "precision": text(config.get("precision")),
        "torch": text(summary.get("torch_version")),
        "skipped steps": shown("bad_steps").removeprefix("0"),
    }
    for name, value in list(named_numbers(summary.get("validation")).items())[:8]:
        facts[f"held-out {name}"] = f"{value:.4g}"
    return {name: value for name, value in facts.items() if value}
