"""Models that fail or hang on purpose, and a dataset that records which rank took which samples."""

import atexit
import json
import math
import os
import signal
import sys
import time
from functools import partial

import torch
from torch import nn
from torch.utils.data import Dataset

from kaitian_mpi.recipes import images
from kaitian_mpi.recipes.models import SmallCNN
from kaitian_mpi.runtime.launcher import read_launch

RANK = read_launch(os.environ).world_rank


def spin(seconds):
    """Use CPU time."""
    ends_at = time.thread_time() + seconds
    while time.thread_time() < ends_at:
        pass


class Slow(nn.Module):
    """Takes 20 ms per sample, so that the job is still running when it is interrupted.

    Once the job's folder has a file `hurry`, it takes no longer than it needs.
    """

    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Linear(3 * 32 * 32, num_classes)

    def forward(self, x):
        if not os.path.exists("hurry"):
            time.sleep(0.02 * len(x))
        return self.layer(x.flatten(1))


class Steady(Slow):
    """`Slow`, and each call takes 2 ms of CPU time, which is what an emulated slowdown multiplies.

    So a busy machine hardly changes what a step takes.
    """

    def forward(self, x):
        spin(2e-3)
        return super().forward(x)


class Paced(Slow):
    """Takes 0.5 ms per sample, of which 0.1 ms is CPU time, which an emulated slowdown multiplies.

    So a large slowdown changes what a step takes more than a busy machine can.
    """

    def forward(self, x):
        spin(1e-4 * len(x))
        time.sleep(4e-4 * len(x))
        return self.layer(x.flatten(1))


class SlowAndWide(Slow):
    """`Slow` with a gradient of 1 MiB, which hosts exchange in several rounds."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.table = nn.Parameter(torch.zeros(2**14, 16))

    def forward(self, x):
        return super().forward(x) + self.table.mean(0)[:10]


def where(num_classes):
    """Print which environment the rank runs in."""
    print(f"rank {RANK} in {sys.prefix}", flush=True)
    return SmallCNN(num_classes)


class Large(Slow):
    """`Slow` with 256 MiB of frozen weights, and as much memory that is in no checkpoint."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.table = nn.Parameter(torch.ones(2**16, 1024), requires_grad=False)
        self.unsaved = [torch.ones(2**16, 1024)]

    def forward(self, x):
        return super().forward(x) + self.table[0, :10] + self.table[-1, :10]


def differing(num_classes):
    """Return a model that is not the same on every rank."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4 + RANK))


def not_a_model(num_classes):
    return torch.ones(num_classes)


class Exact(nn.Module):
    """Computes in float64, and no sample's output depends on another sample.

    So the weights depend neither on the number of ranks nor on which rank takes which sample. A
    training step takes at least 20 ms. `self.calls` is the number of the current one.
    """

    def __init__(self, num_classes):
        super().__init__()
        self.calls = 0
        self.layers = nn.Sequential(
            nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, num_classes)
        ).double()

    def forward(self, x):
        if self.training:
            self.calls += 1
            time.sleep(0.02)
            self.before_call()
        return self.layers(x.double())

    def before_call(self):
        pass


class Telling(Exact):
    """Rank 0 prints each step; one takes at least 0.1 s."""

    def before_call(self):
        time.sleep(0.08)
        if RANK == 0:
            print(f"rank 0 computes {self.calls}", flush=True)


class SlowToEvaluate(Exact):
    """Takes 0.15 s per batch of an evaluation."""

    def forward(self, x):
        time.sleep(0 if self.training else 0.15)
        return super().forward(x)


def acting(call, rank, act):
    """Return a model that acts on a rank in a call; the first one is in the benchmark, if any."""

    class Acting(Exact):
        def before_call(self):
            if (self.calls, RANK) == (call, rank):
                act()

    return Acting


def fail(how):
    """Print the time, and act."""
    print(f"fault at {time.time()}", flush=True)
    how()


def raise_error():
    raise ValueError("planted")


raising = acting(12, 2, partial(fail, raise_error))
exiting = acting(12, 2, partial(fail, partial(sys.exit, 3)))
leaving = acting(12, 2, partial(fail, partial(sys.exit, 0)))
PrintsFirstStep = acting(1, 1, partial(print, "rank 1 computes", flush=True))
DiesInFirstForward = acting(1, 1, partial(os.kill, os.getpid(), signal.SIGKILL))
Hanging = acting(5, 1, partial(time.sleep, 10_000))


def hanging_data():
    """Load the digits; hangs on rank 1."""
    if RANK == 1:
        time.sleep(10_000)
    return images.load_digits(0.2)


class HangingInBenchmark(Exact):
    """Hangs on rank 0 in the first step of the benchmark."""

    def forward(self, x):
        # The trial of the smallest batch takes at most 2 samples.
        if self.training and RANK == 0 and len(x) > 2:
            time.sleep(10_000)
        return super().forward(x)


def hanging_in_setup(num_classes):
    """Build a model: hangs on rank 2 here, and on rank 0 in the benchmark."""
    if RANK == 2:
        time.sleep(10_000)
    return HangingInBenchmark(num_classes)


def stopping_in_setup(num_classes):
    """Build a model of layers; rank 1 is stopped here."""
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 16), nn.Linear(16, num_classes))


def stopping_at_its_end(num_classes):
    """Build a model; rank 1 is stopped when it exits."""
    if RANK == 1:
        atexit.register(os.kill, os.getpid(), signal.SIGSTOP)
    return SmallCNN(num_classes)


class NeverFinite(Exact):
    """Its output on rank 1 is NaN from step 4 on."""

    first, last = 4, math.inf

    def forward(self, x):
        outputs = super().forward(x)
        is_bad = self.first <= self.calls <= self.last and RANK == 1
        return outputs * float("nan") if is_bad else outputs


class Faulty(NeverFinite):
    """On rank 1, a bit of the weights flips in step 5, and the output of step 3 is NaN."""

    first, last = 3, 3

    def before_call(self):
        if self.calls == 5 and RANK == 1:
            with torch.no_grad():
                self.layers[2].weight.view(torch.int64)[3, 7] ^= 1 << 40


class Dropping(nn.Module):
    """Has all state that differs between ranks: batch norm statistics and random numbers.

    A training step takes at least 0.1 s.
    """

    def __init__(self, num_classes):
        super().__init__()
        features = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(6), nn.Flatten()
        self.layers = nn.Sequential(*features, nn.Dropout(0.3), nn.Linear(8 * 25, num_classes))

    def forward(self, x):
        if self.training:
            time.sleep(0.1)
        return self.layers(x)


def with_wrong_kernel(num_classes):
    """Return a model that on rank 1, as on a device with a wrong kernel, halves a gradient."""

    def lose_half(module, inputs, output):
        if RANK == 1 and output.requires_grad:
            output.register_hook(lambda gradient: gradient / 2)

    model = SmallCNN(num_classes)
    model.features.register_forward_hook(lose_half)
    return model


def wide(num_classes):
    """Return a model of 2.4 MB."""
    hidden = nn.Linear(3 * 32 * 32, 192)
    return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(192, num_classes))


class RecordedDataset(Dataset):
    """Images; writes the sample indices of each batch to a file per rank, if given a folder."""

    num_classes = 10

    def __init__(self, images, folder):
        self.images, self.folder = images, folder

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        inputs, labels = self.images[[index]]
        return inputs[0], int(labels[0])

    def __getitems__(self, indices):
        if self.folder:
            path = os.path.join(self.folder, str(RANK))
            with open(path, "a") as file:
                file.write(json.dumps(indices) + "\n")
        return list(zip(*self.images[indices], strict=True))


def recorded_digits():
    train, validation = images.load_digits(0.2)
    return RecordedDataset(train, os.environ.get("RECORD_IN")), RecordedDataset(validation, None)
