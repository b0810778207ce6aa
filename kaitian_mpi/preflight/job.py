"""Examines the ranks of a job: each examines itself, and rank 0 gathers the facts.

Rank 0 waits for each rank with a time limit, so that a rank that hangs or has died is named. There
are no collectives, because a collective would hang with that rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import combinations, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from kaitian_mpi import __version__
from kaitian_mpi.preflight.examination import Examination
from kaitian_mpi.preflight.facts import (
    JobFacts,
    LinkFacts,
    OtherVersionError,
    RankFacts,
    collect_mpi,
)
from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.polling import keep_alive, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

_EXTRA_SEC = 5.0
_PROBE_SEC = 10.0
_ORDERS_SEC = 60.0
_SETTLE_SEC = 2.0
_TRIPS = 20
_TRANSFERS = 4
_SMALL_BYTES = 64 << 10
_LARGE_BYTES = 4 << 20
_QUICK_SEC = 0.02  # for the small transfer: the large one then takes 1.3 s at most
_MAX_HOSTS = 8
_MAX_LOCAL_RANKS = 4


class Job:
    """This rank's part in the examination of a job."""

    def __init__(self, comm: MPI.Comm, examination: Examination, timeout: float) -> None:
        self._comm = comm
        self._examination = examination
        self._timeout = timeout
        self._probe_sec = min(_PROBE_SEC, timeout)
        self._post = Post(comm, self._probe_sec)
        self._failed = False

    @property
    def is_clean(self) -> bool:
        """Whether MPI can be finalized: no rank is missing, and no message is in flight."""
        return not self._failed and self._post.settle(_SETTLE_SEC)

    def examine(self) -> JobFacts:
        """Return the facts of all ranks. Call on rank 0 only; the others call `serve`."""
        job = self._gather()
        if not job.missing:
            job = replace(job, links=self._probe_links([facts.host for facts in job.ranks]))
        self._failed = bool(job.missing) or any(link.error for link in job.links)
        return job

    def end(self, code: int) -> None:
        """Make the other ranks exit with this code. Call on rank 0 only."""
        for rank in range(1, self._comm.size):
            self._post.send(rank, {"code": code})

    def serve(self) -> int:
        """Examine this rank, and probe its links as rank 0 says; return the exit code."""
        self._post.send(0, asdict(self._examination.first_facts))
        self._post.send(0, asdict(self._own_facts()))
        while True:
            order = self._post.receive(0, 2 * self._timeout + _ORDERS_SEC)
            if "code" in order:
                return int(order["code"])
            self._post.send(0, self._probe(*order["pair"]))

    def _own_facts(self) -> RankFacts:
        facts = self._examination.results()
        return replace(facts, rank=self._comm.rank, mpi=collect_mpi(self._comm))

    def _gather(self) -> JobFacts:
        limit = self._timeout + _EXTRA_SEC
        deadline = time.monotonic() + limit
        rank_facts = {0: self._own_facts()}
        missing: dict[int, str] = {}
        for rank in range(1, self._comm.size):
            where = "joined MPI"
            try:
                for _ in range(2):  # the facts known immediately, and then all facts
                    left = max(0.0, deadline - time.monotonic())
                    facts = RankFacts.from_json(self._post.receive(rank, left))
                    where = f"started its examination on {facts.host}"
                rank_facts[rank] = facts
            except NoAnswerError as error:
                late = f"has sent nothing since, within {limit:.0f} s"
                missing[rank] = f"{where}, and {error if error.__cause__ else late}"
            except OtherVersionError as error:
                missing[rank] = f"runs kaitian-mpi {error}, and rank 0 {__version__}"
        return JobFacts(ranks=tuple(rank_facts.values()), missing=missing)

    def _probe_links(self, hosts: Sequence[str]) -> tuple[LinkFacts, ...]:
        """Let pairs of ranks probe their links, until one fails."""
        links: list[LinkFacts] = []
        for pairs in choose_pairs(hosts):
            probes = [(pair, rank) for pair in pairs for rank in pair if rank != 0]
            for pair, rank in probes:
                self._post.send(rank, {"pair": pair})
            results = {pair: self._probe(*pair) if 0 in pair else {} for pair in pairs}
            for pair, rank in probes:
                try:
                    answer = self._post.receive(rank, 2 * self._probe_sec + _EXTRA_SEC)
                except NoAnswerError as error:
                    answer = {"error": f"rank {rank} {error}"}
                results[pair] = {**answer, **results[pair]}
            for (first, second), result in results.items():
                ends = (hosts[first], hosts[second])
                links.append(LinkFacts(ranks=(first, second), hosts=ends, **result))
            if any(link.error for link in links):  # messages may be left over
                break
        return tuple(links)

    def _probe(self, first: int, second: int) -> dict[str, Any]:
        """Join the probe of a link; return this rank's results as fields of `LinkFacts`."""
        other = second if self._comm.rank == first else first
        try:
            return _time_link(self._post, other) if other == second else _answer(self._post, other)
        except NoAnswerError as error:
            return {"error": f"rank {other} {error}"}


def choose_pairs(hosts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Return the pairs of ranks that probe their links, in turns, given each rank's host.

    These are the first ranks of the hosts. Up to eight hosts probe all pairs, one after another;
    more hosts probe each pair of neighbors, in three turns in which no rank has two links. On a
    single host, the first four ranks probe all pairs.
    """
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if len(firsts) == 1:
        firsts = list(range(len(hosts)))[:_MAX_LOCAL_RANKS]
    if len(firsts) <= _MAX_HOSTS:
        return [[pair] for pair in combinations(firsts, 2)]
    links = list(pairwise(firsts))
    return [links[::2], links[1::2], [(firsts[0], firsts[-1])]]


def _time_link(post: Post, other: int) -> dict[str, Any]:
    def trips(size: int, number: int) -> list[float]:
        took = []
        content = bytes(size)
        for _ in range(number):
            start = time.perf_counter()
            post.push(other, content)
            post.pull(other)
            took.append(time.perf_counter() - start)
        return took

    trips(1, 1)  # may open the connection
    latency = median(trips(1, _TRIPS)) / 2
    size = _SMALL_BYTES
    took = min(trips(size, 2))
    if took < _QUICK_SEC:
        size = _LARGE_BYTES
        took = min(trips(size, _TRANSFERS))
    post.push(other, b"")
    speed = size / max(took - latency, took / 10)
    return {"latency_us": 1e6 * latency, "mb_per_sec": speed / 1e6}


def _answer(post: Post, other: int) -> dict[str, Any]:
    while post.pull(other):
        post.push(other, b"\1")
    return {}


class NoAnswerError(Exception):
    """A rank has not answered in time, or has died."""


class Post:
    """Sends JSON values or bytes without waiting; every wait for a rank has a time limit.

    A wait that takes too long raises `NoAnswerError`. Nothing else may use the communicator.
    """

    def __init__(self, comm: MPI.Comm, limit_sec: float) -> None:
        self._comm = comm
        self._limit_sec = limit_sec
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._is_lost = False

    def send(self, target: int, value: Any) -> None:
        """Send a value."""
        self.push(target, json.dumps(value).encode())

    def receive(self, source: int, limit_sec: float) -> Any:
        """Return the next value from a rank."""
        return json.loads(self.pull(source, limit_sec))

    def push(self, target: int, content: bytes) -> None:
        """Send bytes."""
        request = self._comm.Isend(content, target, tags.DOCTOR)
        self._sent.append((request, content))

    def pull(self, source: int, limit_sec: float = 0) -> bytearray:
        """Return the next bytes from a rank."""
        from mpi4py import MPI

        status = MPI.Status()
        limit_sec = limit_sec or self._limit_sec
        self._wait(lambda: bool(self._comm.Iprobe(source, tags.DOCTOR, status)), limit_sec)
        content = bytearray(status.Get_count())
        request = self._comm.Irecv(content, source, tags.DOCTOR)
        self._wait(request.Test, limit_sec, request, content)
        return content

    def settle(self, limit_sec: float) -> bool:
        """Wait until everything sent has arrived; return whether MPI can be finalized."""
        if self._is_lost:
            return False
        return wait_until(lambda: all(request.Test() for request, _ in self._sent), limit_sec)

    def _wait(self, condition: Callable[[], bool], limit_sec: float, *kept: object) -> None:
        from mpi4py import MPI

        try:
            if wait_until(condition, limit_sec):
                return
        except MPI.Exception as error:
            self._is_lost = True
            raise NoAnswerError(f"has died ({error})") from error
        self._is_lost = bool(kept)
        keep_alive(*kept)
        raise NoAnswerError(f"has sent nothing for {limit_sec:.0f} s")
