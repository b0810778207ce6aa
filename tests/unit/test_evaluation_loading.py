"""A slow data set is loaded in pieces, each of which the watchdog counts as progress."""

import torch
from torch.utils.data import Dataset

from kaitian_mpi.engine import evaluation


class Slow(Dataset):
    """Data whose samples take 0.2 s each, by a clock of its own."""

    def __init__(self):
        self.now, self.asked = 0.0, []

    def __getitem__(self, indices):
        self.now += 0.2 * len(indices)
        self.asked.append(len(indices))
        return torch.tensor(indices)[:, None], torch.tensor(indices)


def test_no_piece_of_a_slow_data_set_takes_longer_than_a_sample(monkeypatch):
    data, phases = Slow(), []
    monkeypatch.setattr(evaluation.time, "perf_counter", lambda: data.now)
    monkeypatch.setattr(evaluation, "enter_phase", phases.append)
    inputs, labels = evaluation._Loading(data).load(list(range(5, 21)))
    assert labels.tolist() == inputs[:, 0].tolist() == list(range(5, 21))
    assert data.asked == 16 * [1]
    assert len(phases) == 16
