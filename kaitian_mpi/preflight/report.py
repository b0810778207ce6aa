"""The report: text of 80 columns, or one JSON document."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kaitian_mpi.preflight.checks import judge
from kaitian_mpi.preflight.facts import JobFacts, RankFacts
from kaitian_mpi.preflight.verdict import Level, Verdict, count_text, size_text

FORMAT = 1
_WIDTH = 80
_LEVEL_WIDTH, _NAME_WIDTH = 9, 16
_MAX_RANKS = 32
_MAX_LINES = {Level.OK: 8, Level.WARNING: 16, Level.PROBLEM: 32}  # of one check
_ORDER = list(Level)


@dataclass(frozen=True)
class Report:
    """Verdicts, the facts behind them, and how long it took."""

    job: JobFacts
    verdicts: Sequence[tuple[str, Verdict]]
    """The checks' names and verdicts, in the order of the checks."""
    seconds: float
    subject: str = ""
    """What was examined, if not the ranks."""

    @property
    def level(self) -> Level:
        """The worst of the verdicts."""
        return max(
            (verdict.level for _, verdict in self.verdicts), key=_ORDER.index, default=Level.OK
        )

    @property
    def exit_code(self) -> int:
        """1 if training would fail, else 0."""
        return int(self.level is Level.PROBLEM)


def make_report(job: JobFacts, seconds: float) -> Report:
    """Make all checks."""
    return Report(job, [(check.name, verdict) for check, verdict in judge(job)], seconds)


def to_json(report: Report, version: str, date: str) -> dict[str, Any]:
    """Return the report as JSON can hold it; docs/doctor.md names the fields."""
    return {
        "format": FORMAT,
        "kaitian_mpi": version,
        "date": date,
        "seconds": round(report.seconds, 3),
        "level": str(report.level),
        "training_would_fail": report.exit_code == 1,
        "checks": [
            {
                "check": name,
                "level": str(verdict.level),
                "found": verdict.found,
                "advice": verdict.advice,
            }
            for name, verdict in report.verdicts
        ],
        **asdict(report.job),
    }


def to_text(report: Report, version: str) -> str:
    """Return the report as lines of at most 80 characters."""
    lines = [*_heading(report, version), ""]
    if report.job.ranks:
        lines += [*_ranks(report.job.ranks), ""]
    lines += [*_verdicts(report.verdicts), "", *_summary(report)]
    return "\n".join(lines) + "\n"


def _heading(report: Report, version: str) -> list[str]:
    ranks = len(report.job.ranks) + len(report.job.missing)
    job = f"{count_text(ranks, 'rank')} on {count_text(len(report.job.hosts), 'host')}"
    what = report.subject or ("this machine" if report.job.launcher else job)
    return [f"{what}, examined in {report.seconds:.1f} s by kaitian-doctor {version}"]


def _ranks(ranks: Sequence[RankFacts]) -> Iterator[str]:
    for facts in ranks[:_MAX_RANKS]:
        devices = facts.devices
        shown = "device unknown"
        if devices is not None:
            memory = f", {size_text(devices.memory_bytes)}" if devices.memory_bytes else ""
            shown = f"{devices.chosen or 'no device'}  {devices.name}{memory}"
        yield f"rank {facts.rank}  {facts.host}  {shown}"[:_WIDTH]
    if len(ranks) > _MAX_RANKS:
        yield f"... and {len(ranks) - _MAX_RANKS} more ranks"


def _verdicts(verdicts: Sequence[tuple[str, Verdict]]) -> Iterator[str]:
    shown: dict[tuple[str, Level], int] = {}
    for name, verdict in verdicts:
        key = name, verdict.level
        shown[key] = shown.get(key, 0) + 1
        if shown[key] <= _MAX_LINES[verdict.level]:
            yield from _wrap(verdict.level, name, verdict.found)
            if verdict.advice:
                yield from _wrap("", "", f"-> {verdict.advice}")
    for (name, level), number in shown.items():
        if number > _MAX_LINES[level]:
            yield from _wrap(level, name, f"... and {number - _MAX_LINES[level]} more; see --json")


def _wrap(level: str, name: str, text: str) -> list[str]:
    indent = " " * (_LEVEL_WIDTH + _NAME_WIDTH)
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"{level:<{_LEVEL_WIDTH}}{name:<{_NAME_WIDTH}}",
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def _summary(report: Report) -> Iterable[str]:
    levels = [verdict.level for _, verdict in report.verdicts]
    counts = [
        count_text(levels.count(level), str(level))
        for level in (Level.PROBLEM, Level.WARNING)
        if level in levels
    ]
    if report.exit_code:
        return [f"{', '.join(counts)}: training would fail"]
    return [f"{', '.join(counts) or 'all is well'}: training can start"]
