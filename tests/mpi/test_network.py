"""Allreduce between hosts and between kinds; which rank is on which host is made up here."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from choices import by_default

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.distributed.collectives.hybrid import ALGORITHMS
from kaitian_mpi.distributed.network.allreduce import (
    HostAllreduce,
    Route,
    group_by_host,
    round_elements,
)
from kaitian_mpi.distributed.network.crossing import EXCHANGES
from kaitian_mpi.distributed.network.link import (
    LONG_BYTES,
    SHORT_BYTES,
    Link,
    RouteChoice,
    links_of,
)
from kaitian_mpi.mpi import exchange
from kaitian_mpi.mpi.datatypes import ACCUMULATION_DTYPES, reduction
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.topology import CommunicationSettings
from kaitian_mpi.train.measure import allreduce

pytestmark = pytest.mark.ranks(2)

OPS = {name: getattr(dist.ReduceOp, name) for name in "SUM AVG PRODUCT MIN MAX BAND".split()}
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)


PLACEMENTS = {
    "each alone": lambda rank, size: rank,
    "two hosts in turn": lambda rank, size: rank % 2,
    "the first alone": lambda rank, size: int(rank > 0),
    "the last alone": lambda rank, size: int(rank == size - 1),
}
"""Where the ranks may be: their hosts' numbers."""


def hosts_by(placement, size):
    return group_by_host([PLACEMENTS[placement](rank, size) for rank in range(size)])


def ops_for(dtype):
    if dtype.is_complex:
        return ["SUM", "AVG", "PRODUCT"]
    if dtype is torch.bool:
        return ["SUM", "PRODUCT", "MIN", "MAX", "BAND"]
    return [name for name in OPS if not (name == "BAND" and dtype.is_floating_point)]


def values(dtype, rank, elements):
    """Return values whose sums and products over four ranks are exact in any dtype here."""
    cycle = (torch.arange(elements) + 5 * rank) % 7
    if dtype is torch.bool:
        return cycle % 3 == 0
    signed = cycle if dtype is torch.uint8 else cycle - 3
    return signed.to(dtype)


@functools.cache
def expected(dtype, name, size, elements):
    op = reduction(dtype, OPS[name])
    wide = ACCUMULATION_DTYPES.get(dtype, dtype)
    total = values(dtype, 0, elements).to(wide)
    for rank in range(1, size):
        total = op.combine(total, values(dtype, rank, elements).to(wide))
    op.divide_average(total, size)
    return total.to(dtype)


def routes_on(hosts):
    return [Route(name, n) for name in EXCHANGES for n in sorted({1, min(map(len, hosts))})]


@pytest.mark.parametrize("placement", by_default(PLACEMENTS, ["two hosts in turn"], ranks=(2, 4)))
def test_every_dtype_operation_and_length_is_exact_wherever_the_ranks_are(world, placement):
    hosts = hosts_by(placement, world.size)
    whole = HostAllreduce(world.comm, hosts)
    one_round = round_elements(torch.zeros(70_001), len(hosts))
    assert one_round < 70_001  # several rounds are in progress
    cases = [(dtype, name, 1003) for dtype in DTYPES for name in ops_for(dtype)]
    lengths = (1, 2, 3, one_round + 1, 70_001, 600_001)
    cases += [(torch.float32, "SUM", length) for length in lengths]
    for dtype, name, length in cases:
        own = values(dtype, world.rank, length)
        total = expected(dtype, name, world.size, length)
        for route in routes_on(hosts):
            tensor = own.clone()
            whole.run(tensor, reduction(dtype, OPS[name]), route)
            assert torch.equal(tensor, total), (dtype, name, length, route)


def test_all_ranks_get_the_same_bits(world):
    generator = torch.Generator().manual_seed(world.rank)
    for placement, dtype in itertools.product([*PLACEMENTS][-2:], DTYPES[:3:2]):
        hosts = hosts_by(placement, world.size)
        for route in routes_on(hosts):
            tensor = torch.randn(50_000, generator=generator).to(dtype)
            exact = tensor.double()
            HostAllreduce(world.comm, hosts).run(tensor, reduction(dtype, OPS["AVG"]), route)
            first = tensor.clone()
            dist.broadcast(first, 0)
            assert torch.equal(tensor.view(torch.uint8), first.view(torch.uint8))
            dist.all_reduce(exact, dist.ReduceOp.AVG)
            torch.testing.assert_close(tensor.double(), exact, atol=1e-2, rtol=1e-2)


def test_an_average_of_16_bit_floats_does_not_overflow(world):
    hosts = group_by_host([0, *[1] * (world.size - 1)])
    tensor = torch.full((40_000,), 60_000.0, dtype=torch.float16)
    average = reduction(torch.float16, OPS["AVG"])
    HostAllreduce(world.comm, hosts).run(tensor, average, Route("pairwise"))
    assert tensor.unique().tolist() == [torch.tensor(60_000.0).half().item()]


@pytest.mark.thorough(2, 4)
def test_a_link_is_measured_once_and_by_a_long_tensor_only(world, caplog):
    link = Link(world.comm, group_by_host(range(world.size)), CommunicationSettings())
    op = reduction(torch.float32, OPS["SUM"])
    link.reduce_to_all(torch.zeros(SHORT_BYTES // 4 - 1), op)
    assert link.choice is None
    tensor = torch.full((LONG_BYTES // 4,), float(world.rank + 1))
    with caplog.at_level("INFO"):
        link.reduce_to_all(tensor, op)
    choice = link.choice
    assert choice is not None
    assert set(choice.seconds) == set(link.routes)
    assert tensor.unique().tolist() == [world.size * (world.size + 1) / 2]
    assert set(gather_values(world.comm, str(choice))) == {str(choice)}
    assert link.choose() is choice
    logged = [record.getMessage() for record in caplog.records]
    start = f"allreduce among {world.size} ranks on {world.size} hosts: {choice.route} (measured"
    assert [text for text in logged if text.startswith(start)] == logged[:1] or world.rank != 0


def test_an_algorithm_can_be_forced_and_only_ranks_of_several_hosts_have_links(world):
    settings = CommunicationSettings(network_allreduce="ring")
    link = Link(world.comm, group_by_host(range(world.size)), settings)
    assert link.choose() == RouteChoice(Route("ring"), SHORT_BYTES, None)
    comms = dist.group.WORLD.comms
    assert links_of(comms, [3] * world.size, CommunicationSettings()) == {}
    assert comms.world.py2f() in links_of(comms, range(world.size), CommunicationSettings())


@pytest.mark.thorough(2)
@pytest.mark.parametrize("algorithm", by_default(ALGORITHMS, ["leader", "striped"]))
def test_a_group_of_several_kinds_reduces_over_its_links(world, algorithm, monkeypatch):
    group = dist.new_group()
    used = []
    run = HostAllreduce.run

    def noting(self, tensor, op, route):
        used.append(route)
        run(self, tensor, op, route)

    monkeypatch.setattr(HostAllreduce, "run", noting)
    settings = CommunicationSettings(network_allreduce="ring")
    group.links.update(links_of(group.comms, range(world.size), settings))
    group.host.algorithm = algorithm
    for elements in (20_001, 700_001):
        tensor = values(torch.float32, world.rank, elements)
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
        wanted = expected(torch.float32, "AVG", world.size, elements)
        torch.testing.assert_close(tensor, wanted)
    comms = group.comms
    lanes = {"flat": world.size, "leader": 1, "striped": comms.lanes}[algorithm]
    assert len(used) == (comms.own.ranks.index(world.rank) < lanes)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("is_slow", [False, True])
def test_all_ranks_choose_the_same_and_measure_less_if_slow(world, monkeypatch, is_slow):
    rounds, group, sums = [], dist.group.WORLD, allreduce.sum_gradients
    monkeypatch.setattr(allreduce, "sum_gradients", lambda *a: rounds.append(1) or sums(*a))
    if is_slow and world.rank == 1:  # slow for one rank only
        clock = SimpleNamespace(perf_counter=lambda: 3.0 * len(rounds))
        monkeypatch.setattr(exchange, "time", clock)
    measured = allreduce.choose_algorithm(group, "auto", [1000], torch.device("cpu"))
    assert set(measured) == set(ALGORITHMS)
    assert len(set(gather_values(world.comm, group.host.algorithm))) == 1
    group.host.algorithm = "flat"
    assert len(rounds) == len(ALGORITHMS) * (2 if is_slow else 7)  # one warms up
    (flag,) = (field for field in dataclasses.fields(TrainConfig) if field.name == "allreduce")
    assert flag.metadata["choices"] == ("auto", *ALGORITHMS)
