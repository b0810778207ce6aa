"""Examines the ranks of a job: each examines itself, and rank 0 gathers, and orders the probes.

Rank 0 waits for each rank with a limit, so that one that hangs or has died is named; the others
wait for its orders. Nothing is collective: a collective would hang with the one rank that hangs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kaitian_mpi import __version__
from kaitian_mpi.preflight.collect import collect_mpi
from kaitian_mpi.preflight.examination import Examination
from kaitian_mpi.preflight.facts import Clock, JobFacts, Link, OtherVersionError, RankFacts
from kaitian_mpi.preflight.link_probe import (
    Pair,
    Partner,
    ProbeError,
    answer_clock,
    answer_link,
    compare_clocks,
    plan_rounds,
    time_link,
)
from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.polling import keep_alive, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

_MAX_NAP_SEC = 5e-3
_EXTRA_SEC = 5.0
_PROBE_SEC = 10.0
_ORDERS_SEC = 60.0
_SETTLE_SEC = 2.0
_END = "end"


class NoAnswerError(Exception):
    """A rank has not answered in time, or has died."""


class Post:
    """Sends and receives small values as JSON, with time limits."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._lost = False

    @property
    def is_clean(self) -> bool:
        """Whether no message is in flight, so that MPI can be finalized."""
        return not self._lost and all(request.Test() for request, _ in self._sent)

    def send(self, target: int, value: Any) -> None:
        """Send a value without waiting."""
        from mpi4py import MPI

        content = json.dumps(value).encode()
        request = self._comm.Isend([content, MPI.BYTE], target, tags.DOCTOR_VALUES)
        self._sent.append((request, content))

    def receive(self, source: int, limit_sec: float) -> Any:
        """Return the next value of this rank.

        Raises:
            NoAnswerError: none arrived within the limit.
        """
        from mpi4py import MPI

        status = MPI.Status()

        def has_come() -> bool:
            return bool(self._comm.Iprobe(source, tags.DOCTOR_VALUES, status))

        try:
            if not wait_until(has_come, limit_sec, _MAX_NAP_SEC):
                raise NoAnswerError(f"has sent nothing for {limit_sec:.0f} s")
            content = bytearray(status.Get_count(MPI.BYTE))
            request = self._comm.Irecv([content, MPI.BYTE], source, tags.DOCTOR_VALUES)
            if not wait_until(request.Test, limit_sec, _MAX_NAP_SEC):
                self._lost = True
                keep_alive(request, content)
                raise NoAnswerError(f"has sent half a message in {limit_sec:.0f} s")
        except MPI.Exception as error:
            self._lost = True
            raise NoAnswerError(f"has died ({error})") from error
        return json.loads(content)

    def settle(self, limit_sec: float) -> bool:
        """Wait until everything sent has arrived; return whether it has."""
        return wait_until(lambda: self.is_clean, limit_sec, _MAX_NAP_SEC)


class Job:
    """This rank's part in the examination of a job.

    Args:
        comm: all ranks; nothing else may communicate on it.
        examination: this rank's.
        timeout: seconds that an examination may take.
    """

    def __init__(self, comm: MPI.Comm, examination: Examination, timeout: float) -> None:
        self._comm, self._examination, self._timeout = comm, examination, timeout
        self._post = Post(comm)
        self._probe_sec = min(_PROBE_SEC, timeout)
        self._failed = False

    @property
    def is_clean(self) -> bool:
        """Whether MPI can be finalized: no rank is missing, and no message is in flight."""
        return not self._failed and self._post.settle(_SETTLE_SEC)

    def examine(self) -> JobFacts:
        """Return the facts of all ranks. On rank 0 only; the others `serve`."""
        ranks, missing = self._gather()
        if missing:
            self._failed = True
            return JobFacts(ranks=ranks, missing=missing)
        hosts = [facts.host for facts in ranks]
        try:
            links = self._probe_links(hosts)
            clocks = self._compare_clocks(hosts)
        except _GoneError as error:
            self._failed = True
            return JobFacts(ranks=ranks, missing={error.rank: str(error)})
        return JobFacts(ranks=ranks, links=links, clocks=clocks)

    def end(self, code: int) -> None:
        """Let the other ranks exit with this code. On rank 0 only."""
        for rank in range(1, self._comm.size):
            self._post.send(rank, {"do": _END, "code": code})

    def serve(self) -> int:
        """Examine this rank and do what rank 0 orders; return the exit code.

        Raises:
            NoAnswerError: rank 0 gives no orders.
        """
        self._post.send(0, self._examination.first_facts.to_json())
        self._post.send(0, self._own_facts().to_json())
        while True:
            order = self._post.receive(0, 2 * self._timeout + _ORDERS_SEC)
            if order["do"] == _END:
                return int(order["code"])
            self._post.send(0, self._obey(order))

    def _own_facts(self) -> RankFacts:
        facts = self._examination.results()
        return replace(facts, rank=self._comm.rank, mpi=collect_mpi(self._comm))

    def _gather(self) -> tuple[tuple[RankFacts, ...], dict[int, str]]:
        limit = self._timeout + _EXTRA_SEC
        deadline = time.monotonic() + limit
        found = {0: self._own_facts()}
        missing: dict[int, str] = {}
        for rank in range(1, self._comm.size):
            where = "joined MPI"
            try:
                left = max(0.0, deadline - time.monotonic())
                first = RankFacts.from_json(self._post.receive(rank, left))
                where = f"started its examination on {first.host}"
                left = max(0.0, deadline - time.monotonic())
                found[rank] = RankFacts.from_json(self._post.receive(rank, left))
            except NoAnswerError as error:
                late = f"has sent nothing since, within {limit:.0f} s"
                missing[rank] = f"{where}, and {error if error.__cause__ else late}"
            except OtherVersionError as error:
                missing[rank] = f"runs kaitian-mpi {error}, and rank 0 {__version__}"
        return tuple(found.values()), missing

    def _probe_links(self, hosts: Sequence[str]) -> tuple[Link, ...]:
        links: list[Link] = []
        for pairs in plan_rounds(hosts):
            for first, second in pairs:
                for rank, partner in ((first, second), (second, first)):
                    if rank != 0:
                        self._post.send(
                            rank, {"do": "link", "partner": partner, "asks": rank == first}
                        )
            links += [self._result_of(pair, hosts) for pair in pairs]
        return tuple(links)

    def _result_of(self, pair: Pair, hosts: Sequence[str]) -> Link:
        """Return a pair's result; take part if rank 0 is in the pair."""
        results = []
        for rank, partner in (pair, pair[::-1]):
            if rank == 0:
                results.append(self._obey({"do": "link", "partner": partner, "asks": True}))
            else:
                results.append(self._answer_of(rank))
        errors = [result["error"] for result in results if result.get("error")]
        self._failed = self._failed or bool(errors)
        latency, rate = results[0].get("found", (None, None))
        return Link(
            ranks=pair,
            hosts=(hosts[pair[0]], hosts[pair[1]]),
            latency_us=None if errors else latency,
            mb_per_sec=None if errors else rate,
            error=errors[0] if errors else "",
        )

    def _compare_clocks(self, hosts: Sequence[str]) -> tuple[Clock, ...]:
        firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
        clocks = []
        for rank in firsts[1:] if not self._failed else ():
            self._post.send(rank, {"do": "clock"})
            try:
                skew, uncertainty = compare_clocks(self._partner(rank))
            except ProbeError as error:
                raise _GoneError(rank, str(error)) from error
            self._answer_of(rank)
            clocks.append(Clock(host=hosts[rank], skew_sec=skew, uncertainty_sec=uncertainty))
        return tuple(clocks)

    def _answer_of(self, rank: int) -> dict[str, Any]:
        try:
            # Each of a probe's messages has its limit; the first one that is late ends it.
            answer = self._post.receive(rank, 2 * self._probe_sec + _EXTRA_SEC)
        except NoAnswerError as error:
            raise _GoneError(rank, str(error)) from error
        assert isinstance(answer, dict)
        return answer

    def _obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do a probe; return its result, or its error."""
        try:
            if order["do"] == "clock":
                answer_clock(self._partner(0))
                return {}
            partner = self._partner(order["partner"])
            if order["asks"]:
                return {"found": time_link(partner)}
            answer_link(partner)
        except ProbeError as error:
            return {"error": str(error)}
        return {}

    def _partner(self, rank: int) -> Partner:
        return Partner(self._comm, rank, self._probe_sec)


class _GoneError(Exception):
    """A rank has stopped responding."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"stopped responding: {reason}")
        self.rank = rank
