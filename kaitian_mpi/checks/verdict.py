"""A verdict: what facts mean for training, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kaitian_mpi.checks.facts import JobFacts, RankFacts


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """Training works, but slower or less safely than it could."""
    PROBLEM = "problem"
    """Training would fail."""


@dataclass(frozen=True)
class Verdict:
    """One line of a report."""

    level: Level
    found: str
    """What was found."""
    advice: str = ""
    """What to do; empty if all is well."""

    def __str__(self) -> str:
        """Return it as one line of a message."""
        return f"{self.found}; {self.advice}" if self.advice else self.found


Judge = Callable[[JobFacts], Iterable[Verdict]]


@dataclass(frozen=True)
class Check:
    """A named judgement of facts."""

    name: str
    judge: Judge
    """Pure; returns no verdict where the facts it needs are missing."""
    before_jobs: bool = False
    """Whether its facts cost nothing, so that it is made before every job."""


def ok(found: str) -> Verdict:
    """Return a verdict that all is well."""
    return Verdict(Level.OK, found)


def warning(found: str, advice: str) -> Verdict:
    """Return a verdict that something could be better."""
    return Verdict(Level.WARNING, found, advice)


def problem(found: str, advice: str) -> Verdict:
    """Return a verdict that training would fail."""
    return Verdict(Level.PROBLEM, found, advice)


def problem_from(error: str, where: str = "", advice: str = "") -> Verdict:
    """Return a problem from an error's message, whose last part may say what to do.

    Args:
        error: such as `found no mpirun; install one`.
        where: added to what was found.
        advice: where the message has none.
    """
    found, _, in_message = error.rpartition("; ")
    return problem(f"{where}{found or in_message}", in_message if found else advice)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return `rank 1`, or `ranks 0, 2-5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs]
    is_one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank{'' if is_one else 's'} {', '.join(texts)}"


def by_value(values: Mapping[int, str]) -> str:
    """Return who has what, such as `2.8.0 on rank 0, 2.9.1 on ranks 1, 2`."""
    holders: dict[str, list[int]] = {}
    for rank, value in values.items():
        holders.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in holders.items())


def first_of_each_host(job: JobFacts) -> list[RankFacts]:
    """Return the first rank that has answered on each host."""
    return [ranks[0] for ranks in job.hosts.values()]


def at(job: JobFacts, host: str) -> str:
    """Return ` on <host>` for a message; empty if there is one host."""
    return f" on {host}" if len(job.hosts) > 1 else ""


def size_text(count: float) -> str:
    """Return bytes in words, such as `512 MiB`."""
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"
