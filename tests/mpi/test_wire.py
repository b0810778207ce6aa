"""Gradients in the formats for slow links; which rank is on which host is made up here."""

import hashlib

import pytest
import torch
import torch.distributed as dist
from choices import by_default
from mpi4py import MPI
from torch import nn

from kaitian_mpi.distributed.network.allreduce import group_by_host
from kaitian_mpi.distributed.network.formats import FORMATS
from kaitian_mpi.distributed.network.link import Link
from kaitian_mpi.distributed.reducer import GradientReducer
from kaitian_mpi.distributed.residual import Residual, Residuals
from kaitian_mpi.mpi.datatypes import SUM
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.topology import CommunicationSettings

pytestmark = pytest.mark.ranks(3)
ROUNDING = {"bf16": 2**-8, "int8": 1 / 254, "int4": 1 / 14}
STEPS = 12


@pytest.fixture(params=[pytest.param("alone", marks=pytest.mark.sizes(3)), "in twos"])
def nodes(request, world):
    """Return the number of each rank's host."""
    return [rank if request.param == "alone" else rank // 2 for rank in range(world.size)]


@pytest.fixture
def link(world, nodes):
    settings = CommunicationSettings(network_allreduce="pairwise")
    return Link(world.comm, group_by_host(nodes), settings)


@pytest.fixture
def hosts_of_group(link, monkeypatch):
    """Let the default process group's ranks be on several hosts."""
    group = dist.group.WORLD
    monkeypatch.setitem(group.links, group.comms.world.py2f(), link)
    monkeypatch.setattr(group.host, "algorithm", "flat")  # an earlier test may have set another


def exact_sum(comm, values):
    total = values.double()
    comm.Allreduce(MPI.IN_PLACE, total.numpy())
    return total


def assert_same_bits(world, values):
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    assert len(set(gather_values(world.comm, digest))) == 1


@pytest.mark.parametrize("name", by_default(FORMATS, ("bf16", "int4")))
@pytest.mark.parametrize(
    "dtype", by_default([torch.float32, torch.bfloat16], [torch.float32], ranks=(4,)), ids=str
)
def test_the_sum_is_rounded_alike_on_all_ranks(world, link, name, dtype):
    for count in (1, 700, 400_000):
        torch.manual_seed(world.rank)
        values = torch.randn(count).to(dtype)
        expected = exact_sum(world.comm, values)
        link.gradient_sum(Residual(FORMATS[name], count), 0)(values, SUM)
        assert_same_bits(world, values.float())
        # Each host's sum and that of all are rounded once; the largest is below 12.
        most = 12 * ((world.size + 1) * ROUNDING[name] + 2**-8 * (dtype is torch.bfloat16))
        assert (values - expected).abs().max() < most


@pytest.mark.thorough(4)
@pytest.mark.parametrize("name", by_default(FORMATS, ("bf16", "int4")))
def test_nothing_is_lost_in_the_long_run(world, link, name):
    count = 100_000
    torch.manual_seed(world.rank)
    gradient = torch.randn(count)
    expected = exact_sum(world.comm, gradient)
    residual = Residual(FORMATS[name], count)
    total = torch.zeros(count, dtype=torch.float64)
    errors = []
    for step in range(1, STEPS + 1):
        values = gradient.clone()
        add_up = link.gradient_sum(residual, 0)
        for part in values.split(30_000):  # as the relay cuts it
            add_up(part, SUM)
        residual.keep()
        total += values
        errors.append(float((total / step - expected).abs().mean()))
    assert errors[-1] < errors[0] / 6
    left = exact_sum(world.comm, torch.zeros(count) if (own := residual.value) is None else own)
    assert (total + left - STEPS * expected).abs().max() < 1e-3  # float32's own rounding


def test_counts_behind_the_gradients_cross_exactly(world, link):
    values = torch.full((5000,), 1e-3)
    values[4000:] = 1.0
    link.gradient_sum(Residual(FORMATS["int4"], 4000), 0)(values, SUM)
    assert (values[4000:] == world.size).all()
    assert (values[:4000] - 1e-3 * world.size).abs().max() < 1e-3 * world.size / 7


def test_a_bad_gradient_shows_on_all_ranks_and_is_not_kept(world, link):
    residual = Residual(FORMATS["int8"], 1000)
    for bad in (False, True):
        values = torch.ones(1000) * 0.3
        if bad and world.rank == world.size - 1:
            values[500] = torch.inf
        link.gradient_sum(residual, 0)(values, SUM)
        residual.keep()
        assert bool(values.isfinite().all()) is not bad
        assert residual.value is None or bool(residual.value.isfinite().all())


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 40))


def train(world, wire):
    """Train eight steps; return the weights and this rank's residuals."""
    model, residuals = make_model(), Residuals(wire)
    reducer = GradientReducer(model, residuals=residuals)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(100 + world.rank)
    for x in torch.randn(8, 16, 300):
        optimizer.zero_grad()
        reducer.arm(1 / world.size)
        model(x).square().mean().backward()
        reducer.finish()
        optimizer.step()
        residuals.keep()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, residuals.state_dict()


@pytest.mark.thorough(4)
@pytest.mark.usefixtures("hosts_of_group")
def test_training_ends_where_exact_gradients_lead(world, nodes):
    exact, nothing = train(world, "fp32")
    assert nothing == {}
    before = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    moved = (exact - before).norm()
    for wire, most in (("bf16", 5e-3), ("int8", 5e-3), ("int4", 5e-2)):
        weights, left = train(world, wire)
        assert_same_bits(world, weights)
        assert 0 < (weights - exact).norm() / moved < most
        sends = nodes.index(nodes[world.rank]) == world.rank
        assert set(left) == (set(dict(make_model().named_parameters())) if sends else set())
