"""Verdicts on versions: which differ between ranks, and whether that matters."""

from __future__ import annotations

from collections.abc import Iterator

from kaitian_mpi.checks.facts import JobFacts
from kaitian_mpi.checks.verdict import Level, Verdict, by_value, ok, problem

_PACKAGES = ("kaitian-mpi", "torch")
"""Packages that must be the same everywhere."""
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
    """The ranks have the same kaitian-mpi and torch."""
    for name in _PACKAGES:
        # The part after + names the vendor's build, which differs in a mixed job.
        versions = {
            facts.rank: version.partition("+")[0]
            for facts in job.ranks
            if (version := facts.software.packages.get(name))
        }
        yield from _differing(
            f"the version of {name}",
            versions,
            Level.PROBLEM,
            "install the same version on every host",
        )


def judge_python(job: JobFacts) -> Iterator[Verdict]:
    """The ranks have the same Python, up to the patch release."""
    versions = {facts.rank: ".".join(facts.software.python.split(".")[:2]) for facts in job.ranks}
    yield from _differing(
        "the version of Python",
        versions,
        Level.WARNING,
        "use one version: what torch's object collectives pickle may not be readable",
    )


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
