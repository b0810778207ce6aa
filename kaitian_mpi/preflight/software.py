"""Verdicts on versions: which differ between ranks, and whether that matters."""

from __future__ import annotations

from collections.abc import Iterator

from kaitian_mpi.preflight.facts import JobFacts
from kaitian_mpi.preflight.verdict import Level, Verdict, by_value, ok, problem

_REQUIRED = ("kaitian-mpi", "torch", "mpi4py", "numpy", "psutil", "rich")


def judge_installed(job: JobFacts) -> Iterator[Verdict]:
    """Every rank has all packages."""
    lacking: dict[int, str] = {}
    for facts in job.ranks:
        names = [name for name in _REQUIRED if not facts.software.packages.get(name)]
        if names:
            lacking[facts.rank] = ", ".join(names)
    if lacking:
        yield problem(f"not installed: {by_value(lacking)}", "install kaitian-mpi there with pip")
    elif job.ranks:
        packages = job.ranks[0].software.packages
        shown = ", ".join(f"{name} {packages[name]}" for name in _REQUIRED[:3])
        yield ok(f"Python {job.ranks[0].software.python}, {shown}")


def judge_versions(job: JobFacts) -> Iterator[Verdict]:
    """The ranks have the same kaitian-mpi, and send each other the same messages."""
    versions = {
        facts.rank: version
        for facts in job.ranks
        if (version := facts.software.packages.get("kaitian-mpi"))
    }
    protocols = {facts.rank: str(facts.software.protocol) for facts in job.ranks}
    differing = {"version": versions, "wire protocol": protocols}
    for what, found in differing.items():
        yield from _differing(
            f"the {what} of kaitian-mpi",
            found,
            Level.PROBLEM,
            "install the same version on every host",
        )


def judge_environments(job: JobFacts) -> Iterator[Verdict]:
    """The ranks may have different torch and Python: what has to be the same is compared itself."""
    torch = {facts.rank: facts.software.packages.get("torch", "") for facts in job.ranks}
    python = {facts.rank: facts.software.python for facts in job.ranks}
    for name, versions in (("torch", torch), ("Python", python)):
        if len(set(versions.values())) > 1:
            yield ok(f"{name}: {by_value(versions)}")


def judge_mpi_library(job: JobFacts) -> Iterator[Verdict]:
    """The ranks have the same MPI."""
    libraries = {facts.rank: facts.mpi.library for facts in job.ranks if facts.mpi is not None}
    yield from _differing(
        "the MPI library",
        libraries,
        Level.WARNING,
        "install the same one on every host: two releases may not understand each other",
    )


def _differing(what: str, values: dict[int, str], level: Level, advice: str) -> Iterator[Verdict]:
    if len(set(values.values())) > 1:
        yield Verdict(level, f"{what} differs between ranks: {by_value(values)}", advice)
