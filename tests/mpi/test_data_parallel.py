"""DDP by `data_parallel` or a hook: the gradient of the global batch, whatever the split."""

import copy
import inspect
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from choices import by_default
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from uneven import SHARES, by_data_parallel, by_hook, check_like_one_process

from kaitian_mpi import data_parallel
from kaitian_mpi.errors import AgreedError, UnsupportedError
from kaitian_mpi.mpi.world import current_world, set_current_world

# torch's own warnings about a static graph and gradients' strides.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.sizes(1, 3)]

NO_BUFFERS_IN_FORWARD = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}  # before 2.13
)


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


class Batch:
    """Samples, of which each rank has a share, and a network that has the gradient of them all."""

    def __init__(self, world):
        shares = SHARES[: world.size]
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(sum(shares), 6, generator=generator, dtype=torch.float64)
        labels = torch.randint(5, (sum(shares),), generator=generator)
        self.inputs = inputs.split(shares)[world.rank]
        self.labels = labels.split(shares)[world.rank]
        self.alone = Network()
        cross_entropy(self.alone(inputs), labels).backward()

    def loss(self, model):
        return cross_entropy(model(self.inputs), self.labels)

    def check(self, model, times=1):
        check_gradients(model, self.alone, times)


def check_gradients(model, alone, times=1):
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert (one.grad - times * other.grad).abs().max().item() <= 1e-12


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), pytest.param(torch.float32, 1e-5, marks=pytest.mark.thorough)],
)
def test_a_hook_gives_the_gradient_of_the_whole_batch(world, algorithm, dtype, tolerance):
    check_like_one_process(world, by_hook, steps=8, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("mode", by_default(["train", "eval"], ["train"]))
def test_any_split_gives_the_gradient_of_one_process(world, options, mode):
    way = partial(by_data_parallel, mode=mode, **options)
    check_like_one_process(world, way, has_empty_batches=True)


# Not with a static graph: stock DDP itself refuses no_sync in its first step.
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_micro_batches_give_the_gradient_of_one_process(world, options):
    way = partial(by_data_parallel, **options)
    check_like_one_process(world, way, micro_batches=(2, 4, 1), has_empty_batches=True)


@pytest.mark.parametrize("forwards", [1, 2])
def test_gradients_accumulate_over_backwards_and_forwards(world, forwards):
    batch, model = Batch(world), data_parallel(Network())
    for times in (1, 2):
        sum(batch.loss(model) for _ in range(forwards)).backward()
        batch.check(model, times=times * forwards)


def test_forwards_in_evaluation_mode_are_not_counted(world):
    """Also not if their number differs between ranks, or without `no_grad`."""
    batch, model = Batch(world), data_parallel(Network())

    def evaluate():
        model.eval()
        for _ in range(world.rank):
            model(torch.ones(100, 6, dtype=torch.float64))
        model.train()

    for _ in range(2):
        model.zero_grad()
        evaluate()
        loss = batch.loss(model)
        with torch.no_grad():
            evaluate()
            model(torch.ones(50 * world.rank, 6, dtype=torch.float64))
        loss.backward()
        batch.check(model)


@pytest.mark.ranks(2)
def test_a_forward_does_not_wait_for_a_slower_rank(world):
    batch, model = Batch(world), data_parallel(Network(), **NO_BUFFERS_IN_FORWARD)
    token = torch.zeros(1)
    if world.rank == 1:
        dist.recv(token, 0)  # rank 0 sends it after its forward
    loss = batch.loss(model)
    if world.rank == 0:
        dist.send(token, 1)
    loss.backward()
    batch.check(model)


@pytest.mark.sizes(3)
def test_samples_are_counted_in_any_argument_or_by_the_script(world):
    batch = Batch(world)
    inputs = batch.inputs
    for arguments, samples_of in (
        ({"x": inputs}, None),
        ({"x": None, "nested": {"t": [], "deep": (inputs,)}}, None),
        ({"x": torch.ones(1), "columns": inputs.T}, lambda _, given: given["columns"].size(1)),
    ):
        model = data_parallel(Network(), samples_of=samples_of)
        cross_entropy(model(**arguments), batch.labels).backward()
        batch.check(model)


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
        check_gradients(model, alone)


@pytest.mark.sizes(3)
def test_no_samples_on_any_rank_gives_no_gradient(world):
    model = data_parallel(nn.Linear(6, 1))
    model(torch.ones(0, 6)).mean().backward()
    assert model.module.weight.grad.tolist() == [[0.0] * 6]


@pytest.mark.sizes(1)
def test_what_cannot_be_counted_or_joined_is_rejected(world):
    model = data_parallel(Network())
    with pytest.raises(ValueError, match=r"forward\(list, int\).* pass samples_of="):
        model([torch.tensor(1.0)], nested=3)
    with pytest.raises(UnsupportedError, match="batches of 0 rows"), model.join():
        model(torch.ones(1, 6, dtype=torch.float64))
    model = data_parallel(Network(), samples_of=lambda args, kwargs: -1)
    with pytest.raises(ValueError, match="samples_of returned -1; it must return 0 or more"):
        model(torch.ones(1, 6))


@pytest.fixture
def mixed_group(world):
    """A group whose last rank reports another release of torch."""
    known = current_world()
    infos = [*known.infos[:-1], replace(known.infos[-1], torch_version="2.99.0")]
    set_current_world(replace(known, infos=tuple(infos)))
    made = dist.new_group()
    set_current_world(known)
    yield made
    dist.destroy_process_group(made)


def wide_layers():
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)), nn.Linear(600, 1))


@pytest.mark.sizes(2)
def test_buckets_must_be_equal_where_releases_of_torch_differ(world, last, mixed_group):
    model = data_parallel(wide_layers(), group=mixed_group)
    model(torch.ones(2, 600)).mean().backward()
    assert model.module[4].bias.grad.item() == pytest.approx(1.0)
    message = r"divides the gradients differently: torch .* on rank.*; install one"
    # Without unused parameters, the first backward would have one bucket.
    options = {"bucket_cap_mb": 0.1 if world.rank == last else 25, "find_unused_parameters": True}
    with pytest.raises(AgreedError, match=message):
        data_parallel(wide_layers(), group=mixed_group, **options)
