"""Messages of `kaitian-doctor` between two ranks, and how long they take.

Each wait has a limit, and none is collective.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from kaitian_mpi.preflight.facts import Link
from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.polling import keep_alive, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

_TRIPS, _TRANSFERS = 20, 4
_BYTES = 4 << 20
_MAX_ROUNDS, _MAX_LOCAL_RANKS = 7, 4
_MAX_NAP_SEC = 5e-3

Pair = tuple[int, int]


class NoAnswerError(Exception):
    """A rank has not answered in time, or has died."""


class Post:
    """Sends and receives values as JSON without blocking, and bytes while both ranks wait.

    Every wait that takes too long raises `NoAnswerError`. Nothing else may use the communicator.
    """

    def __init__(self, comm: MPI.Comm, limit_sec: float) -> None:
        self._comm, self._limit_sec = comm, limit_sec
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._lost = False

    def send(self, target: int, value: Any) -> None:
        """Send a value without waiting."""
        from mpi4py import MPI

        content = json.dumps(value).encode()
        request = self._comm.Isend([content, MPI.BYTE], target, tags.DOCTOR_VALUES)
        self._sent.append((request, content))

    def receive(self, source: int, limit_sec: float) -> Any:
        """Return the next value of this rank."""
        from mpi4py import MPI

        status = MPI.Status()
        self._wait(lambda: bool(self._comm.Iprobe(source, tags.DOCTOR_VALUES, status)), limit_sec)
        content = bytearray(status.Get_count(MPI.BYTE))
        request = self._comm.Irecv([content, MPI.BYTE], source, tags.DOCTOR_VALUES)
        self._wait(request.Test, limit_sec, request, content)
        return json.loads(content)

    def push(self, target: int, content: bytes) -> None:
        """Send bytes, and wait until they are sent."""
        from mpi4py import MPI

        request = self._comm.Isend([content, MPI.BYTE], target, tags.DOCTOR_PROBE)
        self._wait(request.Test, self._limit_sec, request, content)

    def pull(self, source: int, size: int) -> bytearray:
        """Receive this many bytes."""
        from mpi4py import MPI

        content = bytearray(size)
        request = self._comm.Irecv([content, MPI.BYTE], source, tags.DOCTOR_PROBE)
        self._wait(request.Test, self._limit_sec, request, content, max_nap_sec=1e-3)
        return content

    def settle(self, limit_sec: float) -> bool:
        """Wait until everything sent has arrived, so that MPI can be finalized; or return False."""

        def is_clean() -> bool:
            return not self._lost and all(request.Test() for request, _ in self._sent)

        return wait_until(is_clean, limit_sec, _MAX_NAP_SEC)

    def _wait(
        self,
        condition: Callable[[], bool],
        limit_sec: float,
        *kept: object,
        max_nap_sec: float = _MAX_NAP_SEC,
    ) -> None:
        from mpi4py import MPI

        try:
            if wait_until(condition, limit_sec, max_nap_sec):
                return
        except MPI.Exception as error:
            self._lost = True
            raise NoAnswerError(f"has died ({error})") from error
        self._lost = bool(kept)
        keep_alive(*kept)
        raise NoAnswerError(f"has sent nothing for {limit_sec:.0f} s")


def plan_rounds(hosts: Sequence[str]) -> list[list[Pair]]:
    """Return which pairs of ranks to probe: the rounds one after the other, a round's at once.

    The first ranks of the hosts meet: each other one if there are at most eight hosts, and else
    seven of them. On one host its first four ranks meet.
    """
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if len(firsts) == 1:
        firsts = list(range(len(hosts)))[:_MAX_LOCAL_RANKS]
    places = [*firsts, -1] if len(firsts) % 2 else firsts
    rounds = []
    for _ in range(min(len(places) - 1, _MAX_ROUNDS)):  # the circle method
        half = len(places) // 2
        paired = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in paired if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def probe_links(post: Post, rank: int, hosts: Sequence[str]) -> list[dict[str, Any]]:
    """Take part in the probes of this rank's pairs, up to the first that fails.

    Returns:
        The round and the pair of each, with its latency and bandwidth, or its error.
    """
    results: list[dict[str, Any]] = []
    for number, pairs in enumerate(plan_rounds(hosts)):
        for first, second in (pair for pair in pairs if rank in pair):
            place = {"round": number, "pair": (first, second)}
            try:
                if rank == second:
                    _answer(post, first)
                else:
                    results.append({**place, "found": _time_link(post, second)})
            except NoAnswerError as error:
                other = second if rank == first else first
                results.append({**place, "error": f"rank {other} {error}"})
                return results
    return results


def links_from(results: Sequence[dict[str, Any]], hosts: Sequence[str]) -> tuple[Link, ...]:
    """Return the links that all ranks have probed.

    A rank that waits for one whose probe has failed fails later itself, so only the errors of the
    first round with one are returned.
    """
    failed = min((each["round"] for each in results if "error" in each), default=-1)
    links: dict[Pair, Link] = {}
    for each in results:
        pair, error = (each["pair"][0], each["pair"][1]), each.get("error", "")
        if error and each["round"] != failed:
            continue
        latency, speed = each.get("found", (None, None))
        link = Link(
            ranks=pair,
            hosts=(hosts[pair[0]], hosts[pair[1]]),
            latency_us=latency,
            mb_per_sec=speed,
            error=error,
        )
        if error or pair not in links:
            links[pair] = link
    return tuple(links.values())


def _time_link(post: Post, other: int) -> tuple[float, float]:
    """Return the latency in microseconds and the bandwidth in 10^6 bytes a second, one way."""
    _trip(post, other, b"\0")  # may open the connection
    latency = median(_trip(post, other, b"\0") for _ in range(_TRIPS)) / 2
    took = min(_trip(post, other, bytes(_BYTES)) for _ in range(_TRANSFERS))
    return 1e6 * latency, _BYTES / max(took - latency, took / 10) / 1e6


def _trip(post: Post, other: int, content: bytes) -> float:
    start = time.perf_counter()
    post.push(other, content)
    post.pull(other, 1)
    return time.perf_counter() - start


def _answer(post: Post, other: int) -> None:
    """Answer the messages of `_time_link`."""
    for size in [1] * (1 + _TRIPS) + [_BYTES] * _TRANSFERS:
        post.pull(other, size)
        post.push(other, b"\1")
