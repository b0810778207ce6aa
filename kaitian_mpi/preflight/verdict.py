"""A verdict: a finding about training, with advice."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)

_MAX_NAMES = 4


class Level(StrEnum):
    """The severity of a verdict."""

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
    """The finding."""
    advice: str = ""
    """The advice; empty if all is well."""
    host: str = ""
    """The host it is about; empty if it is about the job. Hosts with the same finding are named
    together."""

    def __str__(self) -> str:
        return f"{self.found}; {self.advice}" if self.advice else self.found


def ok(found: str, host: str = "") -> Verdict:
    """Return a verdict that all is well."""
    return Verdict(Level.OK, found, "", host)


warning = partial(Verdict, Level.WARNING)
problem = partial(Verdict, Level.PROBLEM)


def problem_if(is_problem: bool, found: str, advice: str, host: str = "") -> Verdict:
    """Return a problem if `is_problem`, otherwise a warning."""
    return (problem if is_problem else warning)(found, advice, host)


def problem_from(error: str, where: str = "", advice: str = "") -> Verdict:
    """Return a problem from an error's message; its part after the last `; ` is the advice.

    Without such a part, the advice is `advice`.
    """
    found, _, last_part = error.rpartition("; ")
    if found:
        return problem(f"{where}{found}", last_part)
    return problem(f"{where}{last_part}", advice)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return `rank 1`, or `ranks 0, 2-5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(_run_text(first, last) for first, last in runs)
    is_one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank {text}" if is_one else f"ranks {text}"


def _run_text(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}, {last}" if last == first + 1 else f"{first}-{last}"


def ranks_by(values: Mapping[int, Value]) -> dict[Value, list[int]]:
    """Return the ranks with each value."""
    holders: dict[Value, list[int]] = {}
    for rank, value in values.items():
        holders.setdefault(value, []).append(rank)
    return holders


def by_value(values: Mapping[int, str]) -> str:
    """Return each value with its ranks, such as `2.8.0 on rank 0, 2.9.1 on ranks 1, 2`."""
    return ", ".join(f"{value} on {ranks_text(at)}" for value, at in ranks_by(values).items())


def differ(values: Mapping[int, str]) -> bool:
    """Return whether ranks have different values."""
    return len(set(values.values())) > 1


def merge_hosts(verdicts: Iterable[Verdict], hosts: int) -> list[Verdict]:
    """Merge verdicts that differ only in the host; name the hosts if the job has several."""
    places: dict[Verdict, list[str]] = {}
    for verdict in verdicts:
        places.setdefault(replace(verdict, host=""), []).append(verdict.host)
    return [
        replace(verdict, found=verdict.found + _on_hosts(list(filter(None, names)), hosts))
        for verdict, names in places.items()
    ]


def _on_hosts(names: Sequence[str], hosts: int) -> str:
    if not names or hosts == 1:
        return ""
    if len(names) == hosts:
        return f" on all {hosts} hosts"
    return f" on {list_names(names)}"


def list_names(names: Sequence[str]) -> str:
    """Join names in one line; if there are many, only the first few."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def count_text(number: int, noun: str) -> str:
    """Return a count with its noun, such as `1 core` or `2 cores`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size_text(count: float) -> str:
    """Format a number of bytes, such as `512 MiB`."""
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    if count >= 2**20:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / 2**10:.0f} KiB"
