"""An allreduce in host memory among ranks on several hosts, in rounds of which several are open.

The ranks of a host are reduced to one of them, which exchanges the round with one rank of each
other host and returns the result. With several lanes, the ranks of a host take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from mpi4py import MPI

from kaitian_mpi.distributed.network.crossing import EXCHANGES, Crossing, Exchange, Round, encoded
from kaitian_mpi.distributed.network.formats import BLOCK
from kaitian_mpi.distributed.residual import Residual
from kaitian_mpi.mpi.datatypes import ACCUMULATION_DTYPES, SUM, Reduction, as_raw_buffer
from kaitian_mpi.preflight.verdict import ranks_by
from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.polling import keep_alive, wait_until

# A part is what one message carries, and not more than MPI sends without asking the receiver first
# (`launcher.EAGER_BYTES`). Long ones amortize a message's fixed cost; with short ones the first
# round is sooner on the wire, and the last one sooner back.
_MAX_PART_BYTES = 256 << 10
_MIN_PART_BYTES = 16 << 10
_MAX_ROUND_BYTES = 4 << 20
_LEAST_ROUNDS = 8
_ROUNDS_AT_ONCE = 4  # by lane
_ENCODED_PART = 256 * BLOCK  # elements: enough for a call to pay off, and few enough for the cache
_WIDE_ELEMENTS = 4 << 20  # converted to a wider dtype at once: 16 MB of float32
# The kernel goes on sending and receiving meanwhile, and several rounds are under way, so that
# waking up a little late costs nothing; waking up often costs a core that other ranks need.
_YIELD_SEC = 50e-6
_NAP_SEC = 100e-6

Hosts = tuple[tuple[int, ...], ...]
"""A communicator's ranks on each host, in order; hosts are in the order of their first ranks."""


def group_by_host(nodes: Sequence[int]) -> Hosts:
    """Group ranks 0, 1, … by the numbers of their hosts."""
    return tuple(map(tuple, ranks_by(dict(enumerate(nodes))).values()))


class Route(NamedTuple):
    """A way to reduce tensors between hosts."""

    algorithm: str
    """`mpi` for MPI's own allreduce among all ranks, or an algorithm's name."""
    lanes: int = 1
    """The number of ranks of each host that exchange data with other hosts."""

    def __str__(self) -> str:
        return self.algorithm + (f" in {self.lanes} lanes" if self.lanes > 1 else "")


class HostAllreduce:
    """The allreduce among the ranks of one communicator, which are on several hosts."""

    def __init__(self, comm: MPI.Comm, hosts: Hosts) -> None:
        self._comm = comm
        self._hosts = hosts
        self._here = next(ranks for ranks in hosts if comm.rank in ranks)
        self._unused: list[torch.Tensor] = []

    def run(self, tensor: torch.Tensor, op: Reduction, route: Route) -> None:
        """Reduce a flat contiguous host tensor over all ranks, in place. Collective.

        The result is the same on all ranks, bit for bit. 16-bit floats are rounded once per host
        and once for all hosts.
        """
        if op.is_average and tensor.dtype in ACCUMULATION_DTYPES:
            # A host's sum would be rounded, or overflow, before it is divided.
            for piece in tensor.split(_WIDE_ELEMENTS):
                wide = piece.to(ACCUMULATION_DTYPES[tensor.dtype])
                self.run(wide, op, route)
                piece.copy_(wide)
            return
        length = round_elements(tensor, len(self._hosts), route.lanes)
        chunks = enumerate(tensor.split(length))
        # A ring would round 16-bit floats on each host.
        is_rounded = tensor.is_floating_point() and tensor.dtype in ACCUMULATION_DTYPES
        exchange = EXCHANGES["pairwise" if is_rounded else route.algorithm]
        rounds = (self._round(n, chunk, op, n % route.lanes, exchange) for n, chunk in chunks)
        run_rounds(rounds, _ROUNDS_AT_ONCE * route.lanes)

    def sum_encoded(self, tensor: torch.Tensor, residual: Residual, start: int) -> None:
        """Sum a flat host tensor of gradients, in place, encoded between the hosts. Collective.

        It is the part of the residual's buffer from `start` on. Inside a host the sum is exact, in
        float32. The result is the same on all ranks, bit for bit.
        """
        wide = tensor.float()
        length = _ENCODED_PART * len(self._hosts)
        rounds = (
            self._round(
                number,
                chunk,
                SUM,
                0,
                partial(encoded, residual=residual, start=start + number * length),
                unit=BLOCK,
            )
            for number, chunk in enumerate(wide.split(length))
        )
        run_rounds(rounds, _ROUNDS_AT_ONCE)
        if wide is not tensor:
            tensor.copy_(wide)

    def _round(
        self,
        number: int,
        chunk: torch.Tensor,
        op: Reduction,
        lane_number: int,
        exchange: Exchange,
        unit: int = 1,
    ) -> Round:
        lane = [ranks[lane_number] for ranks in self._hosts]
        tag = tags.NETWORK[number % len(tags.NETWORK)]
        leader = self._here[lane_number]
        if self._comm.rank != leader:
            yield [self._comm.Isend(as_raw_buffer(chunk), leader, tag)]
            yield [self._comm.Irecv(as_raw_buffer(chunk), leader, tag)]
            return
        members = [rank for rank in self._here if rank != leader]
        share = -(-chunk.numel() // (len(lane) * unit)) * unit
        with self._scratch(chunk.dtype, share * len(lane)) as scratch:
            crossing = Crossing(self._comm, lane, tag, op, scratch)
            yield from crossing.reduce_here(chunk, members)
            parts = [chunk[host * share : (host + 1) * share] for host in range(len(lane))]
            yield from exchange(crossing, parts)
        yield [self._comm.Isend(as_raw_buffer(chunk), rank, tag) for rank in members]

    @contextmanager
    def _scratch(self, dtype: torch.dtype, elements: int) -> Iterator[torch.Tensor]:
        """Provide scratch memory for a round; memory of finished rounds is used again."""
        needed = elements * dtype.itemsize
        memory = self._unused.pop() if self._unused else torch.empty(0, dtype=torch.uint8)
        if memory.numel() < needed:
            memory = torch.empty(needed, dtype=torch.uint8)
        yield memory[:needed].view(dtype)
        self._unused.append(memory)


def round_elements(tensor: torch.Tensor, hosts: int, lanes: int = 1) -> int:
    """Return the length of the rounds of a tensor; depends on its length and dtype alone."""
    part = tensor.nbytes // (hosts * lanes * _LEAST_ROUNDS)
    part = min(max(part, _MIN_PART_BYTES), _MAX_PART_BYTES, max(16, _MAX_ROUND_BYTES // hosts))
    return part // tensor.element_size() * hosts


def run_rounds(rounds: Iterable[Round], at_once: int) -> None:
    """Run rounds, of which at most `at_once` are in progress, and sleep while all of them wait.

    They are started in order, so ranks that run the same rounds do not wait for each other in a
    circle.
    """
    waiting = iter(rounds)
    started: dict[Round, Sequence[MPI.Request]] = {}

    def advance() -> bool:
        """Continue all rounds that can; return whether any could."""
        # Not by Testall: if one fails, Open MPI frees others that go on, and ends the job then.
        ready = [
            r for r, requests in started.items() if all(request.Test() for request in requests)
        ]
        for route in ready:
            requests = next(route, None)
            if requests is None:
                del started[route]
            else:
                started[route] = requests
        return bool(ready)

    try:
        while True:
            started.update((route, ()) for route in islice(waiting, at_once - len(started)))
            if not started:
                return
            wait_until(advance, yield_sec=_YIELD_SEC, min_nap_sec=_NAP_SEC)
    except BaseException:
        keep_alive(started)  # MPI may still write to their buffers
        raise
