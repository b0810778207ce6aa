"""Shows runs in a terminal: their rates side by side, and the use of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles

from kaitian_mpi.observe.reading import duration, number_text
from kaitian_mpi.observe.report.run import RecordedRun
from kaitian_mpi.preflight.verdict import count_text

MAX_ROWS = 16
"""The most ranks shown of a run."""
_WIDTH = 20


def side_by_side(runs: Sequence[RecordedRun]) -> str:
    """Return some lines of at most 80 columns about runs, the first one being the reference."""
    names = [run.name if len(run.name) <= 16 else f"…{run.name[-15:]}" for run in runs]
    parts = [_compare(runs, names)] if len(runs) > 1 else []
    parts += [_describe(run, name) for run, name in zip(runs, names, strict=True)]
    return "\n\n".join(parts)


def _compare(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    rates = [run.rate or 0.0 for run in runs]
    wide = max(map(len, names))
    common = [name for name in runs[0].results if all(name in run.results for run in runs)]
    result = "accuracy" if "accuracy" in common else next(iter(common), "")
    title = f"  held-out {result}" if result else ""
    lines = [f"{'':{wide}}  balance    samples/s  {'':{_WIDTH}}{title}"]
    for run, name, rate in zip(runs, names, rates, strict=True):
        shown = number_text(rate) if rate else "?"
        line = f"{name:{wide}}  {run.facts.get('balance', ''):9.9} {shown:>10}  "
        line += _bar(rate / max(rates) if rate else 0)
        line += f"{run.results[result]:>{len(title)}.4g}" if result else ""
        lines.append(line.rstrip())
    for run, name, rate in list(zip(runs, names, rates, strict=True))[1:]:
        varies = (_spread(run) + _spread(runs[0])) / 2
        if not (rate and rates[0]):
            continue
        if rate != rates[0] and abs(rate - rates[0]) <= varies:
            verdict = f"the machine is too busy to compare it with {names[0]}: the rates of a run "
            verdict += f"vary by {number_text(varies, 3)} samples/s"
        else:
            emulated = " (emulated devices)" if any(run.emulated for run in runs) else ""
            verdict = f"{rate / rates[0]:.2f} times the rate of {names[0]}{emulated}"
        lines.append(f"{name}: {verdict}")
    return "\n".join(lines)


def _spread(run: RecordedRun) -> float:
    """Return the interquartile range of a run's rates, in samples/s."""
    rates = [interval.samples_per_sec for interval in run.intervals if interval.samples_per_sec]
    if len(rates) < 2:
        return 0.0
    low, _, high = quantiles(rates, n=4, method="inclusive")
    return high - low


def _describe(run: RecordedRun, name: str) -> str:
    lines = [f"{name}: {run.state}" + (", emulated devices" if run.emulated else "")]
    if run.intervals:
        parts = [f"{number_text(run.rate)} samples/s"] if run.rate else []
        took = duration(run.training_time_sec)
        parts.append(count_text(run.steps, "step") + (f" in {took}" if took else ""))
        parts += [f"held-out {key} {value:.4g}" for key, value in list(run.results.items())[-2:]]
        lines.append("  " + ", ".join(parts))
    busy = _busy(run)
    batches = run.plans[-1].batch_sizes if run.plans else {}
    ranks = list(batches or sorted(busy))
    if not ranks:
        return "\n".join(lines)
    most = max(batches.values(), default=0)
    wide = max(4, *(min(12, len(run.ranks[rank].kind)) for rank in ranks))
    head = f"  rank  {'kind':{wide}}  samples per step{'':{_WIDTH - 6}}computing, % of its time"
    lines.append(head)
    for rank in ranks[:MAX_ROWS]:
        samples = batches.get(rank)
        percent = busy.get(rank)
        line = f"  {rank:4}  {run.ranks[rank].kind:{wide}.{wide}}"
        line += f"  {'?' if samples is None else samples:>5} "
        line += _bar(samples / most if samples else 0)
        line += f"  {'?' if percent is None else f'{percent:.0f}':>5} "
        lines.append((line + _bar((percent or 0) / 100)).rstrip())
    if len(ranks) > MAX_ROWS:
        lines.append(f"  and {len(ranks) - MAX_ROWS} more ranks")
    return "\n".join(lines)


def _busy(run: RecordedRun) -> dict[int, float]:
    computed: dict[int, float] = {}
    passed: dict[int, float] = {}
    for interval in run.intervals:
        for rank, percent in interval.busy().items():
            computed[rank] = computed.get(rank, 0) + percent * interval.seconds
            passed[rank] = passed.get(rank, 0) + interval.seconds
    return {rank: computed[rank] / seconds for rank, seconds in passed.items()}


def _bar(share: float) -> str:
    return ("#" * round(_WIDTH * min(max(share, 0), 1))).ljust(_WIDTH)
