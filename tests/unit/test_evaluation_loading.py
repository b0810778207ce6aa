"""A slow dataset is loaded in pieces that the watchdog counts as progress."""

import pytest
import torch
from torch.utils.data import Dataset

from kaitian_mpi.train import evaluation
from kaitian_mpi.train.data.batches import Batches


class Slow(Dataset):
    """Data whose samples take a fixed time each on a fake clock."""

    def __init__(self, sample_sec):
        self.sample_sec, self.now, self.read_sizes = sample_sec, 0.0, []

    def __getitems__(self, indices):
        self.now += self.sample_sec * len(indices)
        self.read_sizes.append(len(indices))
        return [(torch.tensor([index]), index) for index in indices]


@pytest.mark.parametrize(
    ("sample_sec", "pieces"),
    [(0.2, 16 * [1]), (0.03, [1, 2, 4, 2, 4, 2, 1]), (0.001, [1, 2, 4, 8, 1])],
    ids=["slow", "in between", "fast"],
)
def test_each_piece_loads_quickly_or_is_a_single_sample(monkeypatch, sample_sec, pieces):
    data, phases = Slow(sample_sec), []
    monkeypatch.setattr(evaluation.time, "perf_counter", lambda: data.now)
    monkeypatch.setattr(evaluation, "enter_phase", phases.append)
    samples = list(range(5, 21))
    inputs, labels = evaluation._Reader(Batches(data)).read(samples)
    assert labels.tolist() == inputs[:, 0].tolist() == samples
    assert data.read_sizes == pieces
    assert len(phases) == len(pieces)
