"""Mixtures whose experts are on different ranks: what is a mistake, and what is not."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from samples import QUIET
from torch import nn
from torch.utils.checkpoint import checkpoint

from kaitian_mpi import Experts, Task, Training
from kaitian_mpi.errors import UserError
from kaitian_mpi.train.layouts.experts.call import cut
from kaitian_mpi.train.layouts.experts.exchange import TokenExchange

pytestmark = pytest.mark.sizes(2)

WIDTH = 4


def mixture(experts=2):
    torch.manual_seed(2)
    return Experts(
        [nn.Linear(WIDTH, WIDTH) for _ in range(experts)], nn.Linear(WIDTH, experts), top_k=1
    ).double()


@pytest.fixture
def exchanged(world):
    """Return a function that lets mixtures be exchanged, each with an expert on each rank."""
    made = []

    def exchange(*mixtures, chunks=2):
        by_name = {f"layer{number}": mixture for number, mixture in enumerate(mixtures)}
        owners = [[number % 2 for number, _ in enumerate(one.experts)] for one in mixtures]
        made.append(TokenExchange(world, by_name, owners, chunks, lambda _: nullcontext(), int))
        return made[-1]

    yield exchange
    for each in made:
        each.close()
    world.comm.Barrier()


def tokens(count=6):
    return torch.randn(count, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("experts", [2, 5], ids=["alike", "more-experts"])
def test_mixtures_that_ranks_compute_in_unlike_orders_are_named(world, exchanged, experts):
    first, second = mixture(), mixture(experts)
    exchanged(first, second)
    with pytest.raises(UserError, match=r"layer[01]', while rank \d computes .*the same order"):
        (first, second)[world.rank](tokens())


def test_a_mixture_that_one_rank_leaves_out_is_named(world, exchanged):
    first, second = mixture(), mixture()
    exchange = exchanged(first, second)
    first(tokens())
    if world.rank == 0:
        match = "rank 1 computes no further Experts, while rank 0 computes 'layer1'"
        with pytest.raises(UserError, match=match):
            second(tokens())
    else:
        exchange.finish_forwards()


def test_gradients_on_some_ranks_only_are_named(world, exchanged):
    one = mixture()
    exchanged(one)
    with torch.set_grad_enabled(world.rank == 0), pytest.raises(UserError, match="no_grad"):
        one(tokens())


@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16])
def test_another_precision_on_some_ranks_is_named(world, exchanged, other):
    """Also one of as many bytes."""
    one = mixture()
    exchanged(one)
    dtype = [torch.float32 if other.itemsize > 2 else torch.float16, other][world.rank]
    with pytest.raises(UserError, match="precision"):
        one.to(dtype)(tokens().to(dtype))


def test_a_second_backward_is_refused(world, exchanged):
    one = mixture()
    exchanged(one)
    loss = one(tokens()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UserError, match="twice"):
        loss.backward()


def test_experts_outside_of_the_model_are_refused_if_they_would_be_trained(exchanged):
    teacher = mixture()
    exchanged(mixture())
    with pytest.raises(UserError, match=r"not part of Task\.model"):
        teacher(tokens())
    with torch.no_grad():
        teacher(tokens())
    teacher.requires_grad_(False)(tokens())


def test_a_mixture_on_which_no_loss_of_a_rank_depends(world, exchanged):
    """Rank 1's loss depends on the first and the third, and rank 0's on the second only."""
    layers = [mixture() for _ in range(3)]
    alone = copy.deepcopy(layers)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    rank_tokens = [
        torch.randn(5, WIDTH, dtype=torch.float64, generator=generator) for generator in generators
    ]
    used = [[1], [0, 2]]
    for rank in range(2):
        outputs = [layer(rank_tokens[rank]) for layer in alone]
        sum(outputs[n].square().sum() for n in used[rank]).backward()
    exchange = exchanged(*layers)
    outputs = [layer(rank_tokens[world.rank]) for layer in layers]
    sum(outputs[n].square().sum() for n in used[world.rank]).backward()
    exchange.finish_backward()
    assert exchange.take_used() == [n in used[world.rank] for n in range(3)]
    for layer, other in zip(layers, alone, strict=True):
        expert, expected = layer.experts[world.rank], other.experts[world.rank]
        for one, two in zip(expert.parameters(), expected.parameters(), strict=True):
            assert (one.grad - (0 if two.grad is None else two.grad)).abs().max() < 1e-12


@pytest.mark.parametrize("used", ["both", "the second", "none"])
def test_a_loss_depends_on_what_backward_computes_again_or_is_refused(world, exchanged, used):
    """Else the ranks whose losses do would wait for the others."""
    one, other = mixture(), mixture()
    alone = copy.deepcopy([one, other])
    rows = tokens()
    expected = alone[1](alone[0](rows) if used == "both" else rows)
    exchange = exchanged(one, other)
    middle = checkpoint(one, rows.clone().requires_grad_(), use_reentrant=False)
    output = checkpoint(other, middle if used == "both" else rows, use_reentrant=False)
    assert (output - expected).abs().max() < 1e-12
    if used == "none":
        with pytest.raises(UserError, match=r"layer1 is inside an activation checkpoint"):
            exchange.finish_backward()
        return
    output.square().sum().backward()
    if used == "both":
        exchange.finish_backward()
    else:
        with pytest.raises(UserError, match=r"layer0 .* leave out the checkpoint"):
            exchange.finish_backward()


@pytest.mark.thorough
def test_a_compiled_model_exchanges_tokens(world, exchanged):
    one = mixture()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), one, nn.Tanh()).double()
    rows = tokens()
    expected = model(rows)
    exchanged(one)
    outputs = torch.compile(model, backend="eager")(rows)
    assert (outputs - expected).abs().max() < 1e-12
    outputs.sum().backward()


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_chunks_are_of_equal_length_and_of_few_experts(pieces):
    counts = [3, 0, 7, 1]
    chunks = cut(counts, pieces)
    assert [sum(column) for column in zip(*chunks, strict=True)] == counts
    lengths = [sum(chunk) for chunk in chunks]
    assert max(lengths) - min(lengths) <= 1


class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).square().mean()


def train(model, **settings):
    task = Task(
        model=model,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=tokens(12),
        loss=lambda model, batch: model(batch),
    )
    with Training(task, layout="experts", **{**QUIET, "epochs": 1, **settings}) as training:
        return [step.loss for step in training]


def test_a_forward_between_steps_is_of_every_ranks_tokens(world):
    """Also on a rank that has no sample of the step before."""
    model, rows = Net(mixture(), nn.Linear(WIDTH, WIDTH).double()), torch.ones(3, WIDTH).double()
    task = Task(
        model=model,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=tokens(3),  # of which the last step has one
        loss=lambda model, batch: model(batch),
    )
    settings = {**QUIET, "epochs": 1, "global_batch_size": 2}
    with Training(task, layout="experts", **settings) as training:
        for step in training:
            shares = step.batch_sizes
            with torch.no_grad():
                outputs = model.layers(rows)
            total = outputs.clone()
            dist.all_reduce(total)
            assert (total - world.size * outputs).abs().max() < 1e-12
    assert 0 in shares


def tied():
    one = mixture()
    one.experts[1].weight = one.experts[0].weight
    return one


def outer():
    one = mixture()
    one.experts[0] = mixture()
    return one


MISTAKES = {
    "none": (lambda: nn.Linear(WIDTH, WIDTH).double(), "has no kaitian_mpi.Experts"),
    "tied": (tied, "share a parameter"),
    "nested": (outer, "has Experts inside"),
    "batch norm": (
        lambda: Experts([nn.BatchNorm1d(WIDTH)] * 2, nn.Linear(WIDTH, 2)).double(),
        "BatchNorm1d",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_model_that_cannot_be_trained_so_is_refused(world, name):
    make, text = MISTAKES[name]
    with pytest.raises(UserError, match=text):
        train(Net(make()))
    assert dist.is_initialized()
