import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.distributed.collectives.hybrid import ALGORITHMS
from kaitian_mpi.mpi import exchange
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.train.measure import allreduce

pytestmark = pytest.mark.ranks(2)  # a single kind has only one algorithm


@pytest.mark.parametrize("is_slow", [False, True])
def test_all_ranks_choose_the_same_and_measure_less_if_slow(world, monkeypatch, is_slow):
    rounds, group, sums = [], dist.group.WORLD, allreduce.sum_gradients
    monkeypatch.setattr(allreduce, "sum_gradients", lambda *a: rounds.append(1) or sums(*a))
    if is_slow and world.rank == 1:  # slow for one rank only
        clock = SimpleNamespace(perf_counter=lambda: 3.0 * len(rounds))
        monkeypatch.setattr(exchange, "time", clock)
    measured = allreduce.choose_algorithm(group, "auto", [1000], torch.device("cpu"))
    assert set(measured) == set(ALGORITHMS)
    assert len(set(gather_values(world.comm, group.algorithm))) == 1
    group.algorithm = "flat"
    assert len(rounds) == len(ALGORITHMS) * (2 if is_slow else 7)  # one warms up
    (flag,) = (field for field in dataclasses.fields(TrainConfig) if field.name == "allreduce")
    assert flag.metadata["choices"] == ("auto", *ALGORITHMS)
