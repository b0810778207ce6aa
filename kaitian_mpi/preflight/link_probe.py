"""Times messages between two ranks, and compares two clocks; each wait has a limit."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.polling import keep_alive, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

_MAX_TRIPS = 50
_TRIPS_SEC = 0.1
_FIRST_BYTES, _MAX_BYTES = 256 << 10, 8 << 20
_TRANSFER_SEC = 0.02  # what one transfer should take
_TRANSFERS = 6
_TRANSFERS_SEC = 0.25
_CLOCK_TRIPS = 20
_MAX_ROUNDS = 7
_MAX_LOCAL_PAIRS = 6

Pair = tuple[int, int]


class ProbeError(Exception):
    """A message did not arrive in time."""


def plan_rounds(hosts: Sequence[str]) -> list[list[Pair]]:
    """Return which pairs of ranks to probe: the rounds one after the other, a round's at once.

    Between hosts, the first ranks of the hosts meet: each other one if there are at most eight
    hosts, and else seven of them. On one host its ranks meet, pair by pair, at most six pairs.

    Args:
        hosts: every rank's host.
    """
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if len(firsts) == 1:
        ranks = range(len(hosts))
        pairs = sorted(
            ((a, b) for b in ranks for a in range(b)), key=lambda pair: pair[1] - pair[0]
        )
        return [[pair] for pair in pairs[:_MAX_LOCAL_PAIRS]]
    places = [*firsts, -1] if len(firsts) % 2 else firsts
    rounds = []
    for _ in range(min(len(places) - 1, _MAX_ROUNDS)):  # the circle method
        half = len(places) // 2
        paired = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in paired if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


class Partner:
    """The rank at the other end of a probe.

    Args:
        comm: a communicator of both.
        rank: the other rank.
        limit_sec: how long one message may take.
    """

    def __init__(self, comm: MPI.Comm, rank: int, limit_sec: float) -> None:
        self._comm, self._rank, self._limit = comm, rank, limit_sec

    def push(self, content: bytes | bytearray) -> None:
        """Send bytes, and wait until they are sent."""
        from mpi4py import MPI

        self._wait(self._comm.Isend([content, MPI.BYTE], self._rank, tags.DOCTOR_PROBE), content)

    def receive(self, size: int) -> bytearray:
        """Receive this many bytes."""
        from mpi4py import MPI

        content = bytearray(size)
        self._wait(self._comm.Irecv([content, MPI.BYTE], self._rank, tags.DOCTOR_PROBE), content)
        return content

    def _wait(self, request: MPI.Request, content: bytes | bytearray) -> None:
        from mpi4py import MPI

        try:
            if wait_until(request.Test, self._limit):
                return
        except MPI.Exception as error:
            raise ProbeError(f"MPI says: {error}") from error
        keep_alive(request, content)
        raise ProbeError(f"no message arrived within {self._limit:.0f} s")


def time_link(partner: Partner) -> tuple[float, float]:
    """Return the latency in microseconds and the bandwidth in 10^6 bytes a second, one way.

    The other rank calls `answer_link` at the same time.

    Raises:
        ProbeError: a message did not arrive.
    """
    _trip(partner)  # may open the connection
    trips: list[float] = []
    began = time.perf_counter()
    while len(trips) < _MAX_TRIPS and time.perf_counter() - began < _TRIPS_SEC:
        trips.append(_trip(partner))
    partner.push(b"\0")
    latency = median(trips) / 2
    size = _FIRST_BYTES
    rates: list[float] = []
    began = time.perf_counter()
    while len(rates) < _TRANSFERS and time.perf_counter() - began < _TRANSFERS_SEC:
        content = bytes(size)
        start = time.perf_counter()
        partner.push(struct.pack("<q", size))
        partner.push(content)
        partner.receive(1)
        took = time.perf_counter() - start
        rates.append(size / max(took - 2 * latency, took / 10))
        size = max(_FIRST_BYTES, min(_MAX_BYTES, int(rates[-1] * _TRANSFER_SEC)))
    partner.push(struct.pack("<q", 0))
    return 1e6 * latency, max(rates) / 1e6


def _trip(partner: Partner) -> float:
    start = time.perf_counter()
    partner.push(b"\1")
    partner.receive(1)
    return time.perf_counter() - start


def answer_link(partner: Partner) -> None:
    """Answer the messages of `time_link`.

    Raises:
        ProbeError: a message did not arrive.
    """
    while partner.receive(1)[0]:
        partner.push(b"\1")
    while size := struct.unpack("<q", partner.receive(8))[0]:
        partner.receive(size)
        partner.push(b"\1")


def compare_clocks(partner: Partner) -> tuple[float, float]:
    """Return how many seconds the other rank's clock is ahead, and the uncertainty.

    As in Cristian, "Probabilistic clock synchronization" (1989): the other clock was read between
    the start and the end of a round trip, and the shortest of 20 says it best. The other rank calls
    `answer_clock` at the same time.
    """
    best = (float("inf"), 0.0)
    for _ in range(_CLOCK_TRIPS):
        start, mark = time.time(), time.perf_counter()
        partner.push(b"\1")
        (other,) = struct.unpack("<d", partner.receive(8))
        took = time.perf_counter() - mark
        best = min(best, (took, other - (start + took / 2)))
    return best[1], best[0] / 2


def answer_clock(partner: Partner) -> None:
    """Answer the messages of `compare_clocks`."""
    for _ in range(_CLOCK_TRIPS):
        partner.receive(1)
        partner.push(struct.pack("<d", time.time()))
