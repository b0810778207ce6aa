"""The means over epochs that Lightning logs, with unequal rows on each rank."""

import sys
from types import SimpleNamespace

import pytest
import torch

from kaitian_mpi.integrations.lightning_means import count_rows_exactly

MODULE = "lightning.pytorch.trainer.connectors.logger_connector.result"


class ResultMetric:
    """Has what is extended of Lightning's class."""

    def __init__(self, fx):
        self.meta = SimpleNamespace(fx=fx, is_mean_reduction=True)
        self.is_tensor = True
        self._defaults = {"value": torch.tensor(0.0), "cumulated_batch_size": torch.tensor(0)}
        self.reset()

    def reset(self):
        for name, default in self._defaults.items():
            setattr(self, name, default.clone())

    def update(self, value, batch_size):
        self.value = self.value + value * batch_size
        self.cumulated_batch_size = self.cumulated_batch_size + batch_size


def mean_over(ranks):
    """Return the mean as Lightning computes it."""
    values, counts = (
        torch.stack([getattr(rank, name) for rank in ranks])
        for name in ("value", "cumulated_batch_size")
    )
    count = counts.sum() / len(ranks)
    return float(values.mean() / count.to(counts.dtype))


@pytest.mark.parametrize("fx", ["training_step", "validation_step"])
def test_an_epochs_mean_is_that_over_rows_and_counts_no_row_twice(monkeypatch, fx):
    metric = type("_ResultMetric", (ResultMetric,), {})
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(_ResultMetric=metric))
    counts = True
    count_rows_exactly(lambda: counts)
    count_rows_exactly(lambda: counts)
    ranks = [metric(fx) for _ in range(2)]
    for _ in range(2):
        ranks[0].update(torch.tensor(1.0), 4)
        ranks[1].update(torch.tensor(4.0), 1)
        counts = False
        ranks[1].update(torch.tensor(4.0), 1)  # a row that is given again, in a training
        counts = True
        expected = 8 / 5 if fx == "training_step" else 12 / 6
        assert mean_over(ranks) == pytest.approx(expected)
        for rank in ranks:
            rank.reset()
