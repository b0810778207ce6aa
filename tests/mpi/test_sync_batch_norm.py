"""Batch norm over all ranks equals that of one process with all samples."""

import copy

import pytest
import torch
from test_trainer import make_loop, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import kaitian_mpi
from kaitian_mpi.distributed.sync_batch_norm import local_statistics, sync_batch_norms
from kaitian_mpi.errors import UnsupportedError

pytestmark = pytest.mark.sizes(1, 3)

SPLITS = [[3, 2, 4], [0, 8, 1], [9, 0, 0], [1, 1, 7]]
SHAPES = {"1d": (), "1d with length": (5,), "2d": (4, 3), "3d": (2, 3, 2)}
CLASSES = {"1d": nn.BatchNorm1d, "1d with length": nn.BatchNorm1d, "2d": nn.BatchNorm2d}


class Network(nn.Module):
    """Two batch norms, the first on plain channels; a mean of 30 would cost E[x^2] digits."""

    def __init__(self, norm, **options):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1.0, 2.0, 4))
        self.first, self.second = norm(4, **options), norm(4, **options)

    def forward(self, x):
        scale = self.scale.view(4, *[1] * (x.dim() - 2))
        hidden = torch.tanh(self.first(x * scale + 30))
        return self.second(hidden * scale).square().flatten(1).mean(1) + hidden.flatten(1).sum(1)


def own_of(world, batch, split):
    sizes = split if world.size == 3 else [sum(split)]
    return batch.split(sizes)[world.rank]


def train_steps(model, batches):
    """Return the gradients of each step, and the buffers."""
    found = []
    for batch in batches:
        model.zero_grad()
        batch = batch.clone().requires_grad_()
        output = model(batch)
        loss = output.mean() if len(output) else output.sum()
        loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found + list(model.buffers())


def assert_close(ours, theirs, tolerance=1e-12):
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs, strict=True):
        assert own.dtype == other.dtype
        scale = max(1.0, float(other.double().abs().max()))
        assert (own.double() - other.double()).abs().max() <= tolerance * scale


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"momentum": 0.7}],
    ids=str,
)
def test_any_split_equals_one_process(world, shape, options):
    torch.manual_seed(1)
    alone = Network(CLASSES.get(shape, nn.BatchNorm3d), **options).double()
    ours = kaitian_mpi.convert_sync_batchnorm(copy.deepcopy(alone))
    assert [type(each) for each in sync_batch_norms(alone)] == []
    assert list(ours.state_dict()) == list(alone.state_dict())
    wrapped = kaitian_mpi.data_parallel(ours, broadcast_buffers=False)
    batches = [torch.randn(9, 4, *SHAPES[shape]).double() for _ in SPLITS]
    if shape == "2d":
        batches = [batch.contiguous(memory_format=torch.channels_last) for batch in batches]
    owns = [own_of(world, batch, split) for batch, split in zip(batches, SPLITS, strict=True)]
    assert_close(train_steps(wrapped, owns), train_steps(alone, batches))
    ours.eval()
    alone.eval()
    with torch.no_grad():  # not collective
        assert_close([ours(batches[0])], [alone(batches[0])])


def test_equal_shares_under_stock_ddp_and_a_converted_torch_sync_batch_norm(world):
    torch.manual_seed(1)
    alone = Network(nn.BatchNorm2d).double()
    theirs = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    ours = kaitian_mpi.convert_sync_batchnorm(theirs)
    batches = [torch.randn(3 * world.size, 4, 2, 2).double() for _ in range(2)]
    owns = [batch.chunk(world.size)[world.rank] for batch in batches]
    assert_close(train_steps(DistributedDataParallel(ours), owns), train_steps(alone, batches))


class Checkpointed(nn.Module):
    """Computes its forward again in backward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_checkpointing_no_grad_and_local_statistics(world):
    torch.manual_seed(1)
    alone = Checkpointed(Network(nn.BatchNorm2d).double())
    ours = kaitian_mpi.convert_sync_batchnorm(copy.deepcopy(alone))
    wrapped = kaitian_mpi.data_parallel(ours, broadcast_buffers=False)
    batch = torch.randn(9, 4, 2, 2).double()
    own = own_of(world, batch, SPLITS[0])
    with torch.no_grad():
        assert_close([wrapped(own)], [own_of(world, alone(batch), SPLITS[0])])
    assert_close(train_steps(wrapped, [own]), train_steps(alone, [batch]))
    if world.rank == 0:  # alone, without the others
        with local_statistics():
            plain = nn.BatchNorm2d(4).double()
            norm = kaitian_mpi.convert_sync_batchnorm(copy.deepcopy(plain))
            assert_close([norm(batch)], [plain(batch)])
        copied = copy.deepcopy(ours).inner
        assert "participation" not in copied.first.__dict__
        assert isinstance(copied.first, type(ours.inner.first))


@pytest.mark.ranks(3)
def test_compiled_code_calls_it(world):
    torch.manual_seed(1)
    alone = Network(nn.BatchNorm2d).double()
    ours = kaitian_mpi.convert_sync_batchnorm(copy.deepcopy(alone))
    wrapped = kaitian_mpi.data_parallel(torch.compile(ours, backend="eager"))
    batches = [torch.randn(9, 4, 2, 2).double() for _ in range(2)]
    owns = [own_of(world, batch, SPLITS[0]) for batch in batches]
    assert_close(train_steps(wrapped, owns), train_steps(alone, batches))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_have_statistics_of_thirty_two(world, dtype):
    torch.manual_seed(1)
    alone = nn.BatchNorm2d(4)
    ours = kaitian_mpi.convert_sync_batchnorm(copy.deepcopy(alone))
    batch = torch.randn(9, 4, 3, 3) + 5
    own = own_of(world, batch.to(dtype), SPLITS[0]).requires_grad_()
    output = ours(own)
    assert output.dtype == dtype
    output.float().square().sum().backward()
    whole = batch.to(dtype).float().requires_grad_()
    expected = alone(whole)
    expected.square().sum().backward()
    assert_close(list(ours.buffers()), list(alone.buffers()), 1e-6)
    assert (output.float() - own_of(world, expected, SPLITS[0])).abs().max() < 0.05
    assert own.grad.dtype == dtype
    assert torch.isfinite(own.grad).all()


def test_what_cannot_be_converted_is_named(world):
    class Own(nn.BatchNorm2d):
        def forward(self, input):
            return input

    for layer, match in (
        (Own(2), "has a forward of its own"),
        (nn.LazyBatchNorm1d(), "is not initialized"),
    ):
        with pytest.raises(UnsupportedError, match=rf"^1: .*{match}"):
            kaitian_mpi.convert_sync_batchnorm(nn.Sequential(nn.ReLU(), layer))


def make(world, shares):
    """Return a loop of a model with synchronized batch norm."""
    norm = nn.BatchNorm1d(16)
    trainer = make_loop(world, shares, layers=[kaitian_mpi.convert_sync_batchnorm(norm)])
    return trainer


@pytest.mark.ranks(3)
def test_training_with_empty_shares_equals_that_with_equal_shares(world):
    """In some steps a rank has no samples, or no rank but one has."""
    _, expected = train(even := make(world, [8, 8, 8]))
    plans = {2: [24, 0, 0], 4: [0, 20, 4], 6: [1, 1, 22]}
    _, weights = train(uneven := make(world, [4, 8, 12]), plans)
    assert (weights - expected).abs().max() < 1e-12
    for own, other in zip(uneven.state.model.buffers(), even.state.model.buffers(), strict=True):
        assert torch.allclose(own.double(), other.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(3)
def test_a_share_that_does_not_count_may_have_a_loss_without_gradient(world):
    trainer = make(world, [24, 0, 0])
    loss = trainer._task.loss

    def without_gradient(model, batch):
        found = loss(model, batch)
        return found if trainer.counts else found.detach()

    object.__setattr__(trainer._task, "loss", without_gradient)
    _, weights = train(trainer)
    _, expected = train(make(world, [24, 0, 0]))
    assert torch.equal(weights, expected)
