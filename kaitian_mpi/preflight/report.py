"""Formats the report as text of 80 columns, or as a JSON document."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kaitian_mpi.preflight.facts import JobFacts, RankFacts
from kaitian_mpi.preflight.verdict import Level, Verdict, count_text, size_text

FORMAT = 2
_WIDTH = 80
_LEVEL_WIDTH = 9
_NAME_WIDTH = 16
_MAX_LINES = 32  # for each check and level, and for the ranks


@dataclass(frozen=True)
class Report:
    """The verdicts, the facts behind them, and the time taken."""

    job: JobFacts
    verdicts: Sequence[tuple[str, Verdict]]
    """The checks' names and verdicts, in the order of the checks."""
    seconds: float
    subject: str = ""
    """The name of what was examined, if not the ranks."""

    @property
    def level(self) -> Level:
        """The worst of the verdicts."""
        order = list(Level)
        return max(
            (verdict.level for _, verdict in self.verdicts), key=order.index, default=Level.OK
        )

    @property
    def exit_code(self) -> int:
        """1 if training would fail, else 0."""
        return int(self.level is Level.PROBLEM)


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
    job = report.job
    ranks = count_text(len(job.ranks) + len(job.missing), "rank")
    of_job = f"{ranks} on {count_text(len(job.hosts), 'host')}"
    subject = report.subject or (of_job if job.mpirun is None else "this machine")
    lines = [f"{subject}, examined in {report.seconds:.1f} s by kaitian-doctor {version}", ""]
    if job.ranks:
        lines += [*_ranks(job.ranks), ""]
    levels = Counter(verdict.level for _, verdict in report.verdicts)
    worse = [level for level in (Level.PROBLEM, Level.WARNING) if levels[level]]
    counts = ", ".join(count_text(levels[level], str(level)) for level in worse)
    end = "training would fail" if report.exit_code else "training can start"
    return "\n".join([*lines, *_verdicts(report), "", f"{counts or 'all is well'}: {end}"])


def _ranks(ranks: Sequence[RankFacts]) -> Iterator[str]:
    for facts in ranks[:_MAX_LINES]:
        devices = facts.devices
        shown = "device unknown"
        if devices is not None:
            memory = f", {size_text(devices.memory_bytes)}" if devices.memory_bytes else ""
            shown = f"{devices.chosen or 'no device'}  {devices.name}{memory}"
        yield f"rank {facts.rank}  {facts.host}  {shown}"[:_WIDTH]
    if len(ranks) > _MAX_LINES:
        yield f"... and {len(ranks) - _MAX_LINES} more ranks"


def _verdicts(report: Report) -> Iterator[str]:
    shown: Counter[tuple[str, Level]] = Counter()
    for name, verdict in report.verdicts:
        shown[name, verdict.level] += 1
        if shown[name, verdict.level] <= _MAX_LINES:
            yield from _wrap(verdict.level, name, verdict.found)
            yield from _wrap("", "", f"-> {verdict.advice}" * bool(verdict.advice))
    for (name, level), number in shown.items():
        if number > _MAX_LINES:
            yield from _wrap(level, name, f"... and {number - _MAX_LINES} more; see --json")


def _wrap(level: str, name: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"{level:<{_LEVEL_WIDTH}}{name:<{_NAME_WIDTH}}",
        subsequent_indent=" " * (_LEVEL_WIDTH + _NAME_WIDTH),
        break_on_hyphens=False,
    )
