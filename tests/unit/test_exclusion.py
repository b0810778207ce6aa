"""Which ranks are excluded because a job is faster without them."""

from types import SimpleNamespace

import pytest

from kaitian_mpi.balance.communication import AllreduceCost
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.train.measure import exclusion
from kaitian_mpi.train.measure.exclusion import ranks_to_exclude

FAST, SLOW, SNAIL = (RankCost(0.0, beta_sec) for beta_sec in (0.01, 0.04, 5.0))
TINY = [RankCost(0.75e-4, 4e-7), RankCost(2.5e-4, 4e-7)]
"""Of a tiny model: a step costs 0.1 ms, 0.25 ms on the other core, whatever its samples."""
MIXED, CPUS = ["gpu", "gpu", "mlu", "mlu"], ["cpu"] * 2
LAST = "a single sample takes it 5 s, but a whole step takes the other ranks 0.32 s"


def between_kinds(ranks):
    return 0.5 if set(ranks) & {2, 3} and set(ranks) & {0, 1} else 0.001


def to_rank_2(ranks):
    return 1.0 if 2 in ranks else 0.001


def of_two(ranks):
    return 0.02 * (len(ranks) == 2)


@pytest.mark.parametrize(
    ("kinds", "hosts", "costs", "communication", "error", "excluded", "why", "measured"),
    [
        # Communication is cheap.
        (MIXED, "aabb", [FAST] * 4, 1e-3, 0, [], "", [[0, 1, 2, 3]]),
        # A rank with a best share of zero is excluded first; there is nothing else to compare.
        (["gpu"] * 3, "aaa", [FAST, SNAIL, FAST], 0.0, 0, [1], LAST, [[0, 1, 2]]),
        # A rank is kept where the step is mostly communication.
        (CPUS, "aa", TINY, 0.0, 0, [1], "a single sample", [[0, 1]]),
        (CPUS, "aa", TINY, 1e-3, 0, [1], "a single sample", [[0, 1]]),
        (CPUS, "aa", TINY, 4e-3, 0, [], "", [[0, 1]]),
        # A rank is kept if its measurement is too uncertain.
        (CPUS, "aa", TINY, 0.0, 0.2, [1], "a single sample", [[0, 1]]),
        (CPUS, "aa", TINY, 0.0, 0.6, [], "", [[0, 1]]),
        # A kind that costs more communication than it computes.
        (MIXED, "aaaa", [FAST, FAST, SLOW, SLOW], between_kinds, 0, [2, 3], "with kind mlu", None),
        # A host behind a slow link, whatever its kind.
        (["cpu"] * 3, "aab", [FAST] * 3, to_rank_2, 0, [2], "with host b", None),
        # A gain below 5% excludes nothing.
        (["gpu", "mlu"], "aa", [FAST, RankCost(0.0, 0.3)], of_two, 0, [], "", None),
    ],
)
def test_which_ranks_are_excluded_and_why(
    monkeypatch, kinds, hosts, costs, communication, error, excluded, why, measured
):
    infos = [SimpleNamespace(kind=kind, host=host) for kind, host in zip(kinds, hosts, strict=True)]
    world, asked = SimpleNamespace(size=len(infos), infos=infos), []

    def measure(request, world, ranks, buckets):
        asked.append(list(ranks))
        return AllreduceCost(communication(ranks) if callable(communication) else communication, 0)

    monkeypatch.setattr(exclusion, "measure_allreduce", measure)
    errors = [0.0, error, *[0.0] * (len(infos) - 2)]
    config = TrainConfig(global_batch_size=64)
    found = ranks_to_exclude(config, world, costs, errors, [1 << 20])
    assert sorted(found) == excluded
    assert all(why in reason for reason in found.values())
    assert asked == measured or measured is None
