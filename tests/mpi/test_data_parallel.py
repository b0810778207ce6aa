"""DDP by `data_parallel`: the gradient of the global batch, whatever each rank's share of it."""

import copy
import inspect
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi import data_parallel
from kaitian_mpi.errors import UnsupportedError

# torch's own warnings about a static graph and gradients' strides.
pytestmark = pytest.mark.filterwarnings("ignore")

NO_BUFFERS_IN_FORWARD = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}  # before 2.13
)


SHARES = [7, 0, 13, 3]
STEPS = 4


class Network(nn.Module):
    """A small network that also accepts its inputs in other forms."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 5)).double()

    def forward(self, x, nested=None, columns=None):
        if x is None:
            x = nested["deep"][0]
        return self.layers(x if columns is None else columns.T)


class Data:
    """The same samples on every rank; each step assigns each rank a share of them."""

    def __init__(self, world, micro_batches=1):
        generator = torch.Generator().manual_seed(5)
        shares = [micro_batches * share for share in SHARES[: world.size]]
        size = (STEPS, sum(shares))
        self._inputs = torch.randn(*size, 6, generator=generator, dtype=torch.float64)
        self._labels = torch.randint(5, size, generator=generator)
        self._shares, self._rank = shares, world.rank

    def whole(self, step):
        return self._inputs[step], self._labels[step]

    def own(self, step):
        turn = step % len(self._shares)  # each step another rank has no samples
        shares = self._shares[turn:] + self._shares[:turn]
        start = sum(shares[: self._rank])
        own = slice(start, start + shares[self._rank])
        return self._inputs[step, own], self._labels[step, own]


def assert_equal(ours, theirs):
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (one - other).abs().max().item() <= 1e-12


def assert_equal_gradients(ours, theirs):
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (one.grad - other.grad).abs().max().item() <= 1e-12


def train(model, step_gradient):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        step_gradient(step)
        optimizer.step()


def train_alone(data):
    model = Network()
    train(model, lambda step: loss_of(model, data.whole(step)).backward())
    return model


def loss_of(model, batch):
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 0.001},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_any_split_gives_the_gradient_of_one_process(world, options, mode):
    data = Data(world)
    model = data_parallel(Network(), **options)
    assert type(model) is DistributedDataParallel
    getattr(model, mode)()
    train(model, lambda step: loss_of(model, data.own(step)).backward())
    assert_equal(model, train_alone(data))


# Not with a static graph: stock DDP itself refuses no_sync in its first step.
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_micro_batches_give_the_gradient_of_one_process(world, options):
    data = Data(world, micro_batches=4)
    model = data_parallel(Network(), **options)

    def accumulate(step):
        inputs, labels = data.own(step)
        # Ranks may differ in the number of their micro-batches, but not rank 1 in step 0 here,
        # which has none: its batches are of 0 rows.
        count = [2, 4, 1][(world.rank + step) % 3]
        pieces = list(zip(inputs.chunk(count), labels.chunk(count), strict=True))
        for number, piece in enumerate(pieces, start=1):
            with nullcontext() if number == len(pieces) else model.no_sync():
                (loss_of(model, piece) / len(pieces)).backward()

    train(model, accumulate)
    assert_equal(model, train_alone(data))


def test_gradients_accumulate_without_zero_grad(world):
    data, alone = Data(world), Network()
    model = data_parallel(Network())
    for step in range(2):
        loss_of(model, data.own(step)).backward()
        loss_of(alone, data.whole(step)).backward()
    assert_equal_gradients(model, alone)


def test_two_forwards_before_one_backward(world):
    data, alone = Data(world), Network()
    model = data_parallel(Network())
    for _ in range(2):
        for network, batch in ((model, data.own(0)), (alone, data.whole(0))):
            network.zero_grad()
            first, second = network(batch[0]), network(batch[0] + 1)
            (cross_entropy(first, batch[1]) + cross_entropy(second, batch[1])).backward()
        assert_equal_gradients(model, alone)


def test_forwards_in_evaluation_mode_are_not_counted(world):
    """Also not if their number differs between ranks, or without `no_grad`."""
    data = Data(world)
    model = data_parallel(Network())

    def evaluate():
        model.eval()
        for _ in range(world.rank):
            model(torch.ones(100, 6, dtype=torch.float64))
        model.train()

    def train_and_evaluate(step):
        evaluate()
        loss = loss_of(model, data.own(step))
        with torch.no_grad():
            evaluate()
            model(torch.ones(50 * world.rank, 6, dtype=torch.float64))
        loss.backward()

    train(model, train_and_evaluate)
    assert_equal(model, train_alone(data))


@pytest.mark.ranks(2)
def test_a_forward_does_not_wait_for_a_slower_rank(world):
    data, alone = Data(world), Network()
    loss_of(alone, data.whole(0)).backward()
    model = data_parallel(Network(), **NO_BUFFERS_IN_FORWARD)
    token = torch.zeros(1)
    if world.rank == 1:
        dist.recv(token, 0)  # rank 0 sends it after its forward
    loss = loss_of(model, data.own(0))
    if world.rank == 0:
        dist.send(token, 1)
    loss.backward()
    assert_equal_gradients(model, alone)


@pytest.mark.sizes(3)
def test_samples_are_counted_in_any_argument_or_by_the_script(world):
    data, alone = Data(world), Network()
    loss_of(alone, data.whole(0)).backward()
    inputs, labels = data.own(0)
    for arguments, samples_of in (
        ({"x": inputs}, None),
        ({"x": None, "nested": {"t": [], "deep": (inputs,)}}, None),
        ({"x": torch.ones(1), "columns": inputs.T}, lambda _, given: given["columns"].size(1)),
    ):
        model = data_parallel(Network(), samples_of=samples_of)
        cross_entropy(model(**arguments), labels).backward()
        assert_equal_gradients(model, alone)


class Branches(nn.Module):
    """Uses a different branch on each rank, and one on no rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.branches = nn.ModuleList(nn.Linear(6, 1).double() for _ in range(3))

    def forward(self, x, branch):
        return self.branches[branch](x)


def test_parameters_unused_on_some_ranks(world):
    rows = torch.arange(18, dtype=torch.float64).view(3, 6)
    model = data_parallel(Branches(), find_unused_parameters=True)
    alone = copy.deepcopy(model.module)
    model(rows[: world.rank + 1 if world.rank < 3 else 0], world.rank % 2).sum().backward()
    counts = [1, 2, 3, 0][: world.size]
    for rank, count in enumerate(counts):
        (alone(rows[:count], rank % 2).sum() * count / sum(counts)).backward()
    for ours, theirs in zip(model.module.branches, alone.branches, strict=True):
        assert (ours.weight.grad is None) == (theirs.weight.grad is None)
        if theirs.weight.grad is not None:
            assert torch.allclose(ours.weight.grad, theirs.weight.grad, rtol=0, atol=1e-12)


@pytest.mark.ranks(3)
def test_over_a_subgroup(world):
    group = dist.new_group([0, 2])
    if world.rank in (0, 2):
        rows = torch.full((1 + world.rank, 6), float(world.rank), dtype=torch.float64)
        model = data_parallel(Network(), group=group)
        model(rows).mean().backward()
        alone = Network()
        whole = torch.tensor([0.0, 2.0, 2.0, 2.0], dtype=torch.float64)
        alone(whole[:, None].expand(4, 6)).mean().backward()
        assert_equal_gradients(model, alone)


@pytest.mark.sizes(3)
def test_no_samples_on_any_rank_gives_no_gradient(world):
    model = data_parallel(nn.Linear(6, 1))
    model(torch.ones(0, 6)).mean().backward()
    assert model.module.weight.grad.tolist() == [[0.0] * 6]


@pytest.mark.sizes(1)
def test_inputs_that_cannot_be_counted(world):
    model = data_parallel(Network())
    with pytest.raises(ValueError, match=r"forward of \(list, int\).* pass samples_of="):
        model([torch.tensor(1.0)], nested=3)
    model = data_parallel(Network(), samples_of=lambda args, kwargs: -1)
    with pytest.raises(ValueError, match="samples_of returned -1; it must return 0 or more"):
        model(torch.ones(1, 6))


@pytest.mark.sizes(1)
def test_join_is_rejected(world):
    model = data_parallel(Network())
    with pytest.raises(UnsupportedError, match="batches of 0 rows"), model.join():
        model(torch.ones(1, 6, dtype=torch.float64))
