"""Batch norm over all ranks equals that of one process with all samples."""

import copy
import itertools

import pytest
import torch
from batch_norms import Network, assert_close, check_any_split, shares_of, train_steps
from choices import by_default
from loops import Run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import kaitian_mpi
from kaitian_mpi.distributed.sync_batch_norm import local_statistics
from kaitian_mpi.errors import UnsupportedError

pytestmark = pytest.mark.sizes(1, 3)

SHAPES = {
    "1d": (nn.BatchNorm1d, ()),
    "1d with length": (nn.BatchNorm1d, (5,)),
    "2d": (nn.BatchNorm2d, (4, 3)),
    "3d": (nn.BatchNorm3d, (2, 3, 2)),
}


OPTIONS = (
    *({}, {"affine": False}, {"track_running_stats": False}),
    *({"momentum": None}, {"momentum": 0.7}),
)
TELLING = [  # each shape, and each option
    ("1d with length", {}),
    ("3d", {"affine": False}),
    ("1d", {"track_running_stats": False}),
    ("2d", {"momentum": None}),
    ("2d", {"momentum": 0.7}),
]


@pytest.mark.parametrize(
    ("shape", "options"), by_default(itertools.product(SHAPES, OPTIONS), TELLING), ids=str
)
def test_any_split_equals_one_process(world, shape, options):
    check_any_split(world, *SHAPES[shape], **options)


def both(module):
    """Return a module, and its copy that is synchronized."""
    return module, kaitian_mpi.convert_sync_batchnorm(copy.deepcopy(module))


def two_norms():
    torch.manual_seed(1)
    return Network(nn.BatchNorm2d).double()


def test_equal_shares_under_stock_ddp_and_a_converted_torch_sync_batch_norm(world):
    alone = two_norms()
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
    alone, ours = both(Checkpointed(two_norms()))
    wrapped = kaitian_mpi.data_parallel(ours, broadcast_buffers=False)
    batch = torch.randn(9, 4, 2, 2).double()
    (rank_batch,) = shares_of(world, [batch])
    with torch.no_grad():
        assert_close([wrapped(rank_batch)], shares_of(world, [alone(batch)]))
    assert_close(train_steps(wrapped, [rank_batch]), train_steps(alone, [batch]))
    if world.rank == 0:  # alone, without the others
        with local_statistics():
            plain, norm = both(nn.BatchNorm2d(4).double())
            assert_close([norm(batch)], [plain(batch)])
        copied = copy.deepcopy(ours).inner
        assert "participation" not in copied.first.__dict__
        assert isinstance(copied.first, type(ours.inner.first))


@pytest.mark.thorough
@pytest.mark.ranks(3)
def test_compiled_code_calls_it(world):
    alone, ours = both(two_norms())
    wrapped = kaitian_mpi.data_parallel(torch.compile(ours, backend="eager"))
    batches = [torch.randn(9, 4, 2, 2).double() for _ in range(2)]
    owns = shares_of(world, batches)
    assert_close(train_steps(wrapped, owns), train_steps(alone, batches))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_have_statistics_of_thirty_two(world, dtype):
    torch.manual_seed(1)
    alone, ours = both(nn.BatchNorm2d(4))
    batch = torch.randn(9, 4, 3, 3) + 5
    rank_batch = shares_of(world, [batch.to(dtype)])[0].requires_grad_()
    output = ours(rank_batch)
    assert output.dtype == dtype
    output.float().square().sum().backward()
    whole = batch.to(dtype).float().requires_grad_()
    expected = alone(whole)
    expected.square().sum().backward()
    assert_close(list(ours.buffers()), list(alone.buffers()), 1e-6)
    assert (output.float() - shares_of(world, [expected])[0]).abs().max() < 0.05
    assert rank_batch.grad.dtype == dtype
    assert torch.isfinite(rank_batch.grad).all()


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


def converted(world, shares):
    """Return a run of a model with synchronized batch norm."""
    norm = kaitian_mpi.convert_sync_batchnorm(nn.BatchNorm1d(16))
    return Run(world, shares, layers=[norm], evaluates=False)


@pytest.mark.ranks(3)
def test_training_with_empty_shares_equals_that_with_equal_shares(world):
    """In some steps a rank has no samples, or no rank but one has."""
    even = converted(world, [8, 8, 8]).train()
    uneven = converted(world, [4, 8, 12]).train({2: [24, 0, 0], 4: [0, 20, 4], 6: [1, 1, 22]})
    assert (uneven.weights() - even.weights()).abs().max() < 1e-12
    for buffer, other in zip(uneven.model.buffers(), even.model.buffers(), strict=True):
        assert torch.allclose(buffer.double(), other.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(3)
def test_a_share_that_does_not_count_may_have_a_loss_without_gradient(world):
    run = converted(world, [24, 0, 0])
    task = run.setup.task
    loss = task.loss

    def without_gradient(model, batch):
        batch_loss = loss(model, batch)
        return batch_loss if world.rank == 0 else batch_loss.detach()

    object.__setattr__(task, "loss", without_gradient)
    assert torch.equal(run.train().weights(), converted(world, [24, 0, 0]).train().weights())
