"""Samples of the training tests. A process that loads them imports this module, not the tests'."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from kaitian_mpi import Task

LENGTH, BATCH = 150, 24
EPOCHS, STEPS = 3, 7  # steps an epoch, the last of them with 6 samples
WORDS = 20
QUIET = {
    "global_batch_size": BATCH, "epochs": EPOCHS, "balance": "off", "parity": False,
    "log_interval": 60.0, "check_every": 0,
}  # fmt: skip
ALSO_ALONE = pytest.mark.sizes(1, 3)
IN_BOTH_FORMS = pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
# What takes the same way in both forms: one of them only by `bin/test --all`.
CLOSED, OPEN = pytest.param(False, id="closed"), pytest.param(True, id="open")
CLOSED_AND_ALSO_OPEN = pytest.mark.parametrize(
    "is_open", [CLOSED, pytest.param(True, id="open", marks=pytest.mark.thorough)]
)
OPEN_AND_ALSO_CLOSED = pytest.mark.parametrize(
    "is_open", [pytest.param(False, id="closed", marks=pytest.mark.thorough), OPEN]
)


def change_shares(training, world, step):
    """Set uneven shares that change with the step; in some of them a rank has none."""
    if world.size == 3:
        sizes = [0, 7, BATCH - 7]
        training._session.loop.sampler.set_plan(sizes[step % 3 :] + sizes[: step % 3])


def linear_task(features, **parts):
    """Return a task of a linear layer that learns to make each sample zero."""
    usual = {
        "model": nn.Linear(features, 3),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        "loss": lambda model, batch: model(batch).square().mean(),
    }
    return Task(**{**usual, **parts})


class Points(Dataset):
    """Sample i is generated from i, and its label is a class."""

    gives_batches = True

    def __init__(self, length=LENGTH):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, indices):
        index = torch.tensor(indices, dtype=torch.float64).reshape(-1, 1)
        inputs = torch.cat([index, torch.sin(index), torch.cos(3 * index)], 1)
        return inputs / torch.tensor([self.length, 1, 1]), torch.tensor(
            indices, dtype=torch.int64
        ) % 4


def points(length=LENGTH):
    """Return inputs and their targets."""
    random = torch.Generator().manual_seed(2)
    inputs = torch.randn(LENGTH, 5, generator=random, dtype=torch.float64)[:length]
    return torch.utils.data.TensorDataset(inputs, inputs[:, :1].sin() + inputs[:, 1:2])


def squares(model, batch):
    """Return the mean squared error of a model on them."""
    return functional.mse_loss(model(batch[0]), batch[1])


def texts():
    """Tokens from 1 on; of those with one token nothing is predicted, so that their mean is NaN."""
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 9, (LENGTH,), generator=random).tolist()
    lengths[::4] = [1] * len(lengths[::4])
    return [torch.randint(1, WORDS, (length,), generator=random) for length in lengths]


def pad(samples):
    padded = nn.utils.rnn.pad_sequence([*samples, torch.zeros(2, dtype=torch.int64)], True)[:-1]
    return {"input": padded[:, :-1], "target": padded[:, 1:]}
