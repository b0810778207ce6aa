"""What experts are placed by: counted tokens, the names that are shown, and what is followed."""

from types import SimpleNamespace

import numpy as np
import pytest

from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.experts import Expert, ExpertPlacement, ExpertRank, RankFactors
from kaitian_mpi.balance.ownership import NO_MIRROR
from kaitian_mpi.train.layouts.experts.expert_timer import RankExperts
from kaitian_mpi.train.layouts.experts.measure import (
    ExpertFacts,
    ExpertsPlan,
    tokens_per_sample,
)
from kaitian_mpi.train.layouts.experts.moves import TokenCounts, tokens_like
from kaitian_mpi.train.layouts.experts.names import expert_names, names_in_short
from kaitian_mpi.train.layouts.experts.show import placement_notes

MB = 10**6
EXPERTS = tuple(Expert(number // 3, 10 * MB, 0.0, 64.0) for number in range(6))


def a_rank(counts=(0,) * 6, samples=0, free=100.0 * MB):
    times = ((0.0,) * 6, (1e-6,) * 6, (0.0,) * 6)
    return RankExperts(
        ExpertRank("cpu", 0, RankCost(0.0, 0.0), *times, free), EXPERTS, counts, samples
    )


class Info(SimpleNamespace):
    def __str__(self):
        return f"rank {self.world_rank}"


INFOS = [Info(place=f"place {n}", world_rank=n) for n in range(3)]


def some_facts(free=(100.0 * MB,) * 3):
    ranks = {info.place: a_rank(free=size).rank for info, size in zip(INFOS, free, strict=True)}
    return ExpertFacts(EXPERTS, (2.0,) * 6, ranks, {})


def a_plan(owners, mirrors=(NO_MIRROR,) * 6, is_measured=True):
    placement = ExpertPlacement(owners, mirrors, (2, 2, 2), 1, (0.1,) * 3, 0.1, (MB,) * 3)
    return ExpertsPlan(
        batch_sizes=[2, 2, 2],
        scores=[1.0] * 3,
        costs=None,
        micro_batch_size=None,
        placement=placement,
        mixtures=tuple(expert.mixture for expert in EXPERTS),
        is_measured=is_measured,
    )


def test_experts_are_named_by_their_numbers_after_their_mixtures_if_there_are_several():
    assert expert_names([0, 0, 0]) == ["0", "1", "2"]
    assert expert_names([0, 0, 1]) == ["0.0", "0.1", "1.0"]
    assert names_in_short(["0", "1", "2", "5", "7", "8"]) == "0-2, 5, 7-8"
    assert names_in_short(["0.1", "0.2", "1.0", "1.1"]) == "0.1-2, 1.0-1"
    assert names_in_short([]) == ""


def test_tokens_are_those_of_all_ranks_and_few_of_them_say_little():
    many = tokens_per_sample([a_rank((5000, 1000, 0, 2000, 2000, 2000), 100)] * 2, True)
    assert sum(many) == pytest.approx(120.0)
    assert many[:3] == pytest.approx((50, 10, 0), abs=1)
    few = tokens_per_sample([a_rank((5, 1, 0, 2, 2, 2), 1)], True)
    assert few[:3] == pytest.approx((2.33, 1.89, 1.78), abs=0.1)
    alike = tokens_per_sample([a_rank((5000, 1000, 0, 2000, 2000, 2000), 100)], False)
    assert alike == pytest.approx((20,) * 6)
    assert tokens_per_sample([a_rank()], True) == (1.0,) * 6  # of a task without a loss


def test_what_training_shows_is_kept_by_place():
    facts = some_facts()
    owners = (0, 1, 2, 0, 1, 2)
    placed = facts.placed(SimpleNamespace(infos=INFOS), a_plan(owners, (1,) * 5 + (-1,)).placement)
    assert placed.owners[:3] == ("place 0", "place 1", "place 2")
    assert placed.mirrors == ("place 1",) * 5 + ("",)
    without = SimpleNamespace(infos=[INFOS[1], INFOS[2]])  # rank 0 is lost
    assert placed.whereabouts(without) == ([0, 0, 1, 0, 0, 1], [0] * 5 + [NO_MIRROR])
    assert facts.whereabouts(without) == ([], [])
    slower = facts.observed([1.0] * 6, {"place 1": RankFactors(2.0, 3.0)}, 0.1)
    slower = slower.observed([3.0] * 6, {"place 1": RankFactors(1.5, 2.0)}, 0.2)
    assert slower.factors == {"place 1": RankFactors(3.0, 6.0)}
    assert slower.tokens == (3.0,) * 6
    assert slower.residual_sec == 0.2
    counts = np.array([10, 30, 0, 0, 0, 0])
    assert tokens_like(facts, counts) == pytest.approx([1.5, 4.5, 0, 2, 2, 2])


def test_a_rank_without_memory_is_named_and_so_are_few_mirrors():
    facts = some_facts((100.0 * MB, 100.0 * MB, 1.0 * MB))
    plan = a_plan((0, 1, 0, 1, 0, 1))
    (line,) = placement_notes(INFOS, plan.placement, facts)
    assert "rank 2 holds no expert: the smallest takes" in line
    plan = a_plan((0, 1, 2, 0, 1, 2), (1, 2, 0, -1, -1, -1))
    (line,) = placement_notes(INFOS, plan.placement, some_facts())
    assert "mirrors of 3 of 6 experts" in line
    assert placement_notes(INFOS, a_plan((0,) * 6).placement, some_facts()) == []


def test_the_summary_has_the_experts_by_rank_and_no_time_that_was_not_measured():
    described = a_plan((0, 1, 0, 1, 0, 1), (1, 0, 1, -1, -1, -1)).describe(INFOS)["experts"]
    assert described["by_rank"] == [["0.0", "0.2", "1.1"], ["0.1", "1.0", "1.2"], []]
    assert described["mirrored_by_rank"] == [["0.1"], ["0.0", "0.2"], []]
    assert described["predicted_step_sec"] == 0.1
    described = a_plan((0,) * 6, is_measured=False).describe(INFOS)["experts"]
    assert described["predicted_step_sec"] is None


def test_tokens_are_counted_by_step():
    mixture = SimpleNamespace(experts=[0, 1], tokens_by_expert=[1, 3])
    counts = TokenCounts([mixture])
    assert counts.fractions() is None
    counts.step_done(None, None)
    mixture.tokens_by_expert = [3, 1]
    counts.step_done(None, None)
    assert counts.fractions() == [0.5, 0.5]
