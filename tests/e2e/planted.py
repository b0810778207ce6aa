"""Models that break, for the tests of how a job ends."""

import os
import sys
import time

import torch
from torch import nn

from kaitian_mpi.models.cnn import SmallCNN


class Breaking(SmallCNN):
    """Breaks on rank 2 in its 12th training forward, saying when."""

    def __init__(self, num_classes, how):
        super().__init__(num_classes)
        self.how, self.calls = how, 0

    def forward(self, x):
        if self.training:
            self.calls += 1
        if self.calls == 12 and os.environ["OMPI_COMM_WORLD_RANK"] == "2":
            print(f"fault at {time.time()}", flush=True)
            self.how()
        return super().forward(x)


def raise_error():
    raise ValueError("planted")


def exit_3():
    sys.exit(3)


def exit_0():
    sys.exit(0)


def raising(num_classes):
    return Breaking(num_classes, raise_error)


def exiting(num_classes):
    return Breaking(num_classes, exit_3)


def leaving(num_classes):
    return Breaking(num_classes, exit_0)


class Slow(nn.Module):
    """Takes 20 ms a sample: a job that is still running when it is interrupted."""

    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Linear(3 * 32 * 32, num_classes)

    def forward(self, x):
        time.sleep(0.02 * len(x))
        return self.layer(x.flatten(1))


def slow(num_classes):
    return Slow(num_classes)


def differing(num_classes):
    """A model that is not the same on every rank."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 32 * 32, 4 + int(os.environ["OMPI_COMM_WORLD_RANK"]))
    )


def not_a_model(num_classes):
    return torch.ones(num_classes)
