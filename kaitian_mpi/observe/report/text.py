"""What a terminal shows of runs: their rates side by side, and how busy each rank was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import quantiles

from kaitian_mpi.observe.report.rank_figures import busy_percent
from kaitian_mpi.observe.report.run import PlanChange, Run, format_duration

MAX_ROWS = 16
"""Ranks that are shown of a run."""
_WIDTH = 20
_EIGHTHS = " ▏▎▍▌▋▊▉"
_UNKNOWN = "?"


def side_by_side(runs: Sequence[Run], *, unicode: bool = True) -> str:
    """Return some lines of at most 80 columns about runs, the first one being the reference.

    Args:
        runs: one or more; names of folders may be cut.
        unicode: whether the terminal shows block characters; otherwise bars are made of `#`.
    """
    bar = _block_bar if unicode else _hash_bar
    parts = [_compare(runs, bar)] if len(runs) > 1 else []
    most = max((max(plan.batch_sizes, default=0) for run in runs for plan in run.plans), default=0)
    parts += [_describe(run, most, bar) for run in runs]
    return "\n\n".join(parts)


_Bar = Callable[[float], str]
"""Makes a bar of a share of the whole width."""


def _compare(runs: Sequence[Run], bar: _Bar) -> str:
    """Return a table of the runs' rates and results, and how much faster they are."""
    rates = [run.rate or 0.0 for run in runs]
    names = _names(runs)
    wide = max(map(len, names))
    results = _common_results(runs)[:1]
    head = f"{'':{wide}}  balance    samples/s  {'':{_WIDTH}}"
    lines = [head + "".join(f"  held-out {name}" for name in results)]
    for run, name, rate in zip(runs, names, rates, strict=True):
        share = rate / max(rates) if rate else 0
        shown = f"{rate:,.4g}" if rate else _UNKNOWN
        line = f"{name:{wide}}  {run.facts.get('balance', ''):9.9} {shown:>10}  {bar(share)}"
        line += "".join(f"  {run.results[each]:>{9 + len(each)}.4g}" for each in results)
        lines.append(line.rstrip())
    for name, rate, run in list(zip(names, rates, runs, strict=True))[1:]:
        if rate and rates[0]:
            varies = (_spread(run) + _spread(runs[0])) / 2
            if rate != rates[0] and abs(rate - rates[0]) <= varies:
                lines.append(
                    f"{name}: the machine is too busy to compare it with {names[0]}: the rates "
                    f"of a run vary by {varies:,.3g} samples/s"
                )
                continue
            emulated = " (emulated devices)" if any(run.emulated for run in runs) else ""
            lines.append(f"{name}: {rate / rates[0]:.2f} times the rate of {names[0]}{emulated}")
    return "\n".join(lines)


def _spread(run: Run) -> float:
    """Return by how much the rates of the middle half of a run's readings differ."""
    rates = [interval.samples_per_sec for interval in run.intervals if interval.samples_per_sec]
    if len(rates) < 2:
        return 0.0
    low, _, high = quantiles(rates, n=4, method="inclusive")
    return high - low


def _describe(run: Run, most: int, bar: _Bar) -> str:
    """Return a run's state and a row of bars for each rank.

    Args:
        run: the run.
        most: the batch size of a bar of full width.
        bar: makes the bars.
    """
    marks = [run.state, *(["emulated devices"] if run.emulated else [])]
    lines = [f"{_names([run])[0]}: {', '.join(marks)}", *_results(run)]
    busy = _busy(run)
    plan = run.plans[-1] if run.plans else None
    ranks = list(plan.ranks if plan else sorted(busy))
    if not ranks:
        return "\n".join(lines)
    batches = _batch_sizes(plan)
    kind = max(len(run.ranks[rank].kind) if rank in run.ranks else 0 for rank in ranks)
    kind = max(min(kind, 12), 4)
    head = f"  rank  {'kind':{kind}}  samples per step{'':{_WIDTH - 6}}computing, % of its time"
    lines.append(head.rstrip())
    for rank in ranks[:MAX_ROWS]:
        info = run.ranks.get(rank)
        samples, percent = batches.get(rank), busy.get(rank)
        line = f"  {rank:4}  {info.kind if info else '':{kind}.{kind}}"
        line += f"  {_UNKNOWN if samples is None else samples:>5} "
        line += bar(samples / most if samples and most else 0)
        line += f"  {_UNKNOWN if percent is None else f'{percent:.0f}':>5} "
        lines.append((line + bar((percent or 0) / 100)).rstrip())
    if len(ranks) > MAX_ROWS:
        lines.append(f"  and {len(ranks) - MAX_ROWS} more ranks")
    return "\n".join(lines)


def _results(run: Run) -> list[str]:
    """Return a line of what the run has reached; none if nothing is known."""
    parts = []
    if rate := run.rate:
        parts.append(f"{rate:,.4g} samples/s")
    if run.intervals:
        duration = format_duration(run.training_time_sec)
        parts.append(f"{run.steps:,} steps" + (f" in {duration}" if duration else ""))
    found = list(run.results.items())
    parts += [f"held-out {name} {value:.4g}" for name, value in found[-2:]]
    return ["  " + ", ".join(parts)] if parts else []


def _busy(run: Run) -> dict[int, float]:
    """Return the share of time that each rank computed, in percent, over the whole run."""
    computed: dict[int, float] = {}
    passed: dict[int, float] = {}
    for interval in run.intervals:
        for place, rank in enumerate(interval.ranks):
            percent = busy_percent(interval, place)
            if percent is None or not interval.step_time_sec:
                continue
            seconds = interval.steps * interval.step_time_sec
            passed[rank] = passed.get(rank, 0) + seconds
            computed[rank] = computed.get(rank, 0) + percent * seconds
    return {rank: computed[rank] / seconds for rank, seconds in passed.items() if seconds}


def _batch_sizes(plan: PlanChange | None) -> dict[int, int]:
    return dict(zip(plan.ranks, plan.batch_sizes, strict=True)) if plan else {}


def _common_results(runs: Sequence[Run]) -> list[str]:
    """Return the names of the held-out results that all runs have, the accuracy first."""
    names = [name for name in runs[0].results if all(name in run.results for run in runs)]
    return sorted(names, key=lambda name: name != "accuracy")


def _names(runs: Sequence[Run]) -> list[str]:
    """Return a short name for each run; with a number where two would have the same."""
    names = [run.name if len(run.name) <= 16 else f"…{run.name[-15:]}" for run in runs]
    return [
        f"{name} ({number})" if names.count(name) > 1 else name
        for number, name in enumerate(names, 1)
    ]


def _block_bar(share: float) -> str:
    eighths = round(8 * _WIDTH * min(max(share, 0), 1))
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(_WIDTH)


def _hash_bar(share: float) -> str:
    return ("#" * round(_WIDTH * min(max(share, 0), 1))).ljust(_WIDTH)
