import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from kaitian_mpi.balance.shares import split_micro_batches
from kaitian_mpi.recipes.image_classification import count_right
from kaitian_mpi.train.batch_norm import RunningStatistics
from kaitian_mpi.train.evaluation import evaluate
from kaitian_mpi.train.task import Computation


class Numbers(Dataset):
    """Sample i is the number i with class i % 3."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, indices):
        values = torch.tensor(indices, dtype=torch.float32).reshape(-1, 1)
        return values, torch.tensor(indices, dtype=torch.int64) % 3


class Parity(nn.Module):
    """Predicts class 0 with certainty for even numbers, class 1 for odd ones."""

    def forward(self, x):
        odd = x[:, 0].long() % 2
        return nn.functional.one_hot(odd, 3).float() * 10


def test_evaluation_counts_each_sample_once(world):
    computation = Computation(torch.device("cpu"), "fp32", "contiguous")
    task = SimpleNamespace(metrics=count_right)
    shares = [rank + 0.5 for rank in range(world.size)]
    for length in (1, 2, 61, 403):
        result = evaluate(task, Parity(), Numbers(length), computation, world, shares)
        right = sum(1 for i in range(length) if i % 2 == i % 3)
        assert math.isclose(result["accuracy"], right / length, rel_tol=1e-12)


def test_pooled_statistics_equal_those_of_all_samples(world):
    """One batch a rank, momentum 1: the pooled moments are exactly the whole batch's."""
    counts = [4 * (rank + 1) for rank in range(world.size)]
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(sum(counts), 5, generator=generator, dtype=torch.float64) * 3 + 1
    start = sum(counts[: world.rank])
    norm = nn.BatchNorm1d(5, momentum=1.0).double()
    model = nn.Sequential(norm)
    own = whole[start : start + counts[world.rank]]
    norm(own)
    # torch's running variance is unbiased; pooling applies to the biased one.
    norm.running_var.mul_((len(own) - 1) / len(own))
    RunningStatistics(model).pool(counts[world.rank] / sum(counts))
    assert torch.allclose(norm.running_mean, whole.mean(0), rtol=1e-12)
    assert torch.allclose(norm.running_var, whole.var(0, unbiased=False), rtol=1e-12)


def test_statistics_of_an_epoch_average_its_steps_before_momentum_applies():
    norm = nn.BatchNorm1d(1, momentum=0.25)
    statistics = RunningStatistics(nn.Sequential(norm))
    norm.running_mean.fill_(1000.0)  # from an epoch long ago
    means = [8.0, 2.0, 5.0]
    for step, mean in enumerate(means):
        statistics.before_step(step, 2, 2)
        statistics.before_batch(2)
        norm(torch.tensor([[mean - 1], [mean + 1]]))
    assert torch.allclose(norm.running_mean, torch.tensor([5.0]))
    statistics.before_step(100, 2, 2)
    statistics.before_batch(2)
    assert norm.momentum == 0.25


PLANS = [[6, 2, 1, 3], [1, 0, 9, 2], [0, 5, 5, 2], [2, 2, 2, 2], [0, 0, 0, 4]]


@pytest.mark.parametrize("most", [None, 2])
def test_pooled_means_equal_those_of_one_device(world, most):
    """Steps of different sizes with changing plans; in one, only rank 3 or no rank has samples."""
    generator = torch.Generator().manual_seed(1)
    norm = nn.BatchNorm1d(3, momentum=0.3).double()
    statistics = RunningStatistics(nn.Sequential(norm))
    expected = torch.zeros(3, dtype=torch.float64)
    plans = [plan[: world.size] for plan in PLANS * 3 if sum(plan[: world.size]) > 0]
    for step, plan in enumerate(plans):
        samples = torch.randn(sum(plan), 3, generator=generator, dtype=torch.float64) + step
        expected += max(0.3, 1 / (step + 1)) * (samples.mean(0) - expected)
        own = samples[sum(plan[: world.rank]) :][: plan[world.rank]]
        statistics.before_step(step, len(own), sum(plan))
        for part in own.split(split_micro_batches(len(own), most)) if len(own) else ():
            statistics.before_batch(len(part))
            # Computed here, as a single sample has no variance.
            norm.running_mean += norm.momentum * (part.mean(0) - norm.running_mean)
    statistics.pool(fraction=123.0)
    assert (norm.running_mean - expected).abs().max() < 1e-12


def test_other_buffers_come_from_rank_0(world):
    model = nn.Module()
    model.register_buffer("counter", torch.tensor(world.rank + 7))
    RunningStatistics(model).pool(1 / world.size)
    assert model.counter.item() == 7
