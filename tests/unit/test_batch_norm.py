"""RunningStatistics: when the statistics of the steps lag behind the weights."""

import pytest
from torch import nn

from kaitian_mpi.distributed.sync_batch_norm import convert_sync_batchnorm
from kaitian_mpi.train.batch_norm import RunningStatistics


@pytest.mark.parametrize(
    ("layers", "steps", "lags"),
    [
        ([nn.BatchNorm1d(2)], 0, False),
        ([nn.BatchNorm1d(2)], 1, True),
        ([nn.BatchNorm1d(2)], 49, True),
        ([nn.BatchNorm1d(2)], 50, False),
        ([nn.BatchNorm1d(2, momentum=0.5), nn.BatchNorm2d(3)], 49, True),
        ([nn.BatchNorm1d(2, momentum=0.5)], 10, False),
        ([nn.BatchNorm1d(2, momentum=None)], 1, False),
        ([nn.BatchNorm1d(2, track_running_stats=False)], 1, False),
        ([nn.SyncBatchNorm(2), nn.BatchNorm1d(2)], 1, False),
        ([convert_sync_batchnorm(nn.BatchNorm1d(2))], 1, True),
        ([nn.Linear(2, 2), nn.LayerNorm(2)], 1, False),
    ],
)
def test_statistics_lag_in_a_short_epoch(layers: list[nn.Module], steps: int, lags: bool) -> None:
    assert RunningStatistics(nn.Sequential(*layers)).lag(steps) is lags
