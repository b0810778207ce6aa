"""Examines the ranks of a job: each examines itself, and rank 0 gathers what they find.

Rank 0 waits for each rank with a limit, so that one that hangs or has died is named. Nothing is
collective: a collective would hang with the one rank that hangs.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kaitian_mpi import __version__
from kaitian_mpi.preflight.collect import collect_mpi
from kaitian_mpi.preflight.examination import Examination
from kaitian_mpi.preflight.facts import JobFacts, OtherVersionError, RankFacts
from kaitian_mpi.preflight.links import (
    NoAnswerError,
    Post,
    links_from,
    plan_rounds,
    probe_links,
)

if TYPE_CHECKING:
    from mpi4py import MPI

_EXTRA_SEC = 5.0
_PROBE_SEC = 10.0
_ORDERS_SEC = 60.0
_SETTLE_SEC = 2.0


class Job:
    """This rank's part in the examination of a job."""

    def __init__(self, comm: MPI.Comm, examination: Examination, timeout: float) -> None:
        self._comm, self._examination, self._timeout = comm, examination, timeout
        self._probe_sec = min(_PROBE_SEC, timeout)
        self._post = Post(comm, self._probe_sec)
        self._failed = False

    @property
    def is_clean(self) -> bool:
        """Whether MPI can be finalized: no rank is missing, and no message is in flight."""
        return not self._failed and self._post.settle(_SETTLE_SEC)

    def examine(self) -> JobFacts:
        """Return the facts of all ranks. On rank 0 only; the others `serve`."""
        job = self._gather()
        if not job.missing:
            job = self._with_links(job)
        self._failed = bool(job.missing) or any(link.error for link in job.links)
        return job

    def end(self, code: int) -> None:
        """Let the other ranks exit with this code. On rank 0 only."""
        for rank in range(1, self._comm.size):
            self._post.send(rank, {"code": code})

    def serve(self) -> int:
        """Examine this rank, and probe its links if rank 0 says so; return the exit code."""
        self._post.send(0, self._examination.first_facts.to_json())
        self._post.send(0, self._own_facts().to_json())
        order = self._post.receive(0, 2 * self._timeout + _ORDERS_SEC)
        if "hosts" in order:
            self._post.send(0, probe_links(self._post, self._comm.rank, order["hosts"]))
            order = self._post.receive(0, 2 * self._timeout + _ORDERS_SEC)
        return int(order["code"])

    def _own_facts(self) -> RankFacts:
        facts = self._examination.results()
        return replace(facts, rank=self._comm.rank, mpi=collect_mpi(self._comm))

    def _gather(self) -> JobFacts:
        limit = self._timeout + _EXTRA_SEC
        deadline = time.monotonic() + limit
        found = {0: self._own_facts()}
        missing: dict[int, str] = {}
        for rank in range(1, self._comm.size):
            where = "joined MPI"
            try:
                for _ in range(2):  # what it knows at once, and then all
                    left = max(0.0, deadline - time.monotonic())
                    facts = RankFacts.from_json(self._post.receive(rank, left))
                    where = f"started its examination on {facts.host}"
                found[rank] = facts
            except NoAnswerError as error:
                late = f"has sent nothing since, within {limit:.0f} s"
                missing[rank] = f"{where}, and {error if error.__cause__ else late}"
            except OtherVersionError as error:
                missing[rank] = f"runs kaitian-mpi {error}, and rank 0 {__version__}"
        return JobFacts(ranks=tuple(found.values()), missing=missing)

    def _with_links(self, job: JobFacts) -> JobFacts:
        hosts = [facts.host for facts in job.ranks]
        others = range(1, self._comm.size)
        for rank in others:
            self._post.send(rank, {"hosts": hosts})
        results = probe_links(self._post, 0, hosts)
        missing: dict[int, str] = {}
        limit = self._probe_sec * (1 + len(plan_rounds(hosts))) + _EXTRA_SEC
        deadline = time.monotonic() + limit
        for rank in others:
            try:
                results += self._post.receive(rank, max(0.0, deadline - time.monotonic()))
            except NoAnswerError as error:
                missing[rank] = f"stopped responding: {error}"
        return replace(job, links=links_from(results, hosts), missing=missing)
