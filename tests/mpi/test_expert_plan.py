"""Experts and rows are planned alike on every rank, by what each has measured, and move."""

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
from samples import Points
from torch import nn
from trace_rules import check_trace, read_trace, spans_of

from kaitian_mpi import Experts, Task, Training
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.expert_plan import Replacement
from kaitian_mpi.balance.expert_prediction import calibrate
from kaitian_mpi.balance.experts import RankFactors
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import LayerTooLargeError, UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.observe.run_folder import NoFolder
from kaitian_mpi.observe.timeline.trace_file import NAME
from kaitian_mpi.train.layouts import choose
from kaitian_mpi.train.layouts.experts import experts_layout, moves
from kaitian_mpi.train.layouts.experts.expert_timer import ExpertTimer
from kaitian_mpi.train.layouts.experts.experts_layout import ExpertsLayout
from kaitian_mpi.train.layouts.experts.measure import find_facts
from kaitian_mpi.train.layouts.shard.shard_layout import ShardLayout
from kaitian_mpi.train.measure.plan import Profiles, unmeasured_profiles
from kaitian_mpi.train.setup import Setup

pytestmark = pytest.mark.sizes(1, 2, 3)

LOSS = nn.CrossEntropyLoss()


def make_task(experts=6, **parts):
    torch.manual_seed(5)
    held = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(experts)]
    mixture = Experts(held, nn.Linear(8, experts))
    usual = {
        "model": nn.Sequential(nn.Linear(3, 8), mixture, nn.Linear(8, 4)).double(),
        "optimizer": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        "data": Points(),
        "loss": lambda m, batch: LOSS(m(batch[0]), batch[1]),
    }
    return Task(**{**usual, **parts})


def config_of(**settings):
    return TrainConfig(layout="experts", global_batch_size=24, benchmark_seconds=0.2, **settings)


def same_on_all(world, value):
    gathered = gather_values(world.comm, value)
    assert gathered == [gathered[0]] * world.size
    return gathered[0]


@pytest.mark.thorough(2)
def test_ranks_measure_experts_and_plan_alike_and_the_model_stays(world):
    task, config = make_task(), config_of()
    before = copy.deepcopy(task.model.state_dict())
    setup = Setup(task, NoFolder())
    layout = ExpertsLayout.find(config, setup, world)
    setup = layout.place(config, setup, world)
    profiles = layout.find_profiles(config, world, setup, {})
    plan = layout.plan(config, world, profiles)
    facts, placement = layout.facts, plan.placement
    same_on_all(world, str(facts))
    same_on_all(world, str(placement))
    assert sum(plan.batch_sizes) == sum(placement.batch_sizes) == 24
    assert min(plan.batch_sizes) >= 1
    assert sorted(number for r in range(world.size) for number in placement.experts_of(r)) == [
        *range(6)
    ]
    assert sum(facts.tokens) == pytest.approx(2.0)  # top_k of a token each
    assert all(rank.token_sec[0] > 0 for rank in facts.by_place.values())
    size = 2 * 8 * 16 + 16 + 8
    assert {expert.held_bytes for expert in facts.experts} == {4 * 8 * size}  # with Adam's state
    assert {expert.row_bytes for expert in facts.experts} == {64}
    assert facts.experts[0].kept_bytes > 0
    assert plan.is_measured
    assert plan.costs is None
    cost = profiles.by_place[world.info.place].cost
    assert cost.beta_sec > 0
    after = task.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in task.model.parameters())
    assert len(layout.planned_bytes(config, world, plan, profiles)) == world.size
    same_on_all(world, layout.planned_bytes(config, world, plan, profiles))


def test_without_balance_or_a_loss_rows_and_experts_are_equal(world):
    for parts, settings in (({}, {"balance": "off"}), ({"loss": None}, {})):
        config = config_of(**settings)
        facts = ExpertsLayout.find(config, Setup(make_task(**parts), NoFolder()), world).facts
        plan = facts.plan(config, world, unmeasured_profiles(config, world, 1))
        assert plan.batch_sizes == [24 // world.size] * world.size
        held = [len(plan.placement.experts_of(rank)) for rank in range(world.size)]
        assert held == [6 // world.size] * world.size
        assert not plan.is_measured
        assert plan.describe(world.infos)["experts"]["predicted_step_sec"] is None


@pytest.mark.sizes(2, 3)
@pytest.mark.thorough(2)
def test_a_rank_without_memory_holds_no_expert(world):
    config = config_of(balance="off")
    facts = find_facts(config, Setup(make_task(), NoFolder()), world)
    profiles = unmeasured_profiles(config, world, 1)
    last = world.infos[-1].place
    little = {**facts.by_place, last: replace(facts.by_place[last], free_bytes=1000.0)}
    plan = replace(facts, by_place=little).plan(config, world, profiles)
    assert plan.placement.experts_of(world.size - 1) == []
    none = {place: replace(rank, free_bytes=1000.0) for place, rank in facts.by_place.items()}
    with pytest.raises(UserError, match="experts, their gradients and optimizer state take"):
        replace(facts, by_place=none).plan(config, world, profiles)


@pytest.mark.sizes(2)
@pytest.mark.parametrize(("free", "chosen"), [(1e9, ExpertsLayout), (1000.0, ShardLayout)])
def test_a_model_that_cannot_be_timed_has_its_experts_on_different_ranks_if_they_fit(
    world, monkeypatch, free, chosen
):
    def too_large(*_, **__):
        raise LayerTooLargeError("a layer needs 9 MB; use smaller layers")

    def measured(*arguments, **settings):
        facts = find_facts(*arguments, **settings)
        ranks = {place: replace(rank, free_bytes=free) for place, rank in facts.by_place.items()}
        return replace(facts, by_place=ranks)

    monkeypatch.setattr(choose, "find_facts", too_large)
    monkeypatch.setattr(experts_layout, "find_facts", measured)
    monkeypatch.setattr(ShardLayout, "find", lambda *_: ShardLayout.__new__(ShardLayout))
    setup = Setup(make_task(), NoFolder())
    layout = choose.choose_layout(config_of(), setup, world)
    assert type(layout) is chosen


def test_what_keeps_a_rank_busy_while_others_are_timed_may_not_fit(world):
    """Then it sleeps."""
    timer = ExpertTimer(config_of(), Setup(make_task(), NoFolder()), world)
    calls = []

    def call():
        calls.append(1)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    timer._last = call
    timer.keep_busy()
    timer.keep_busy()
    assert len(calls) == 1


@pytest.mark.sizes(2)
def test_a_slow_rank_gets_fewer_rows_and_experts(world):
    config = config_of()
    facts = find_facts(config, Setup(make_task(), NoFolder()), world)
    profiles = unmeasured_profiles(config, world, 1)
    cost = RankCost(1e-3, 1e-3)
    known = {place: replace(p, cost=cost) for place, p in profiles.by_place.items()}
    none, each = (0.0,) * 6, (1e-3,) * 6
    times = {
        place: replace(rank, fixed_sec=none, token_sec=each, update_sec=none)
        for place, rank in facts.by_place.items()
    }
    facts = replace(facts, by_place=times, tokens=(1 / 3,) * 6, links={})
    slow = facts.observed(facts.tokens, {world.infos[1].place: RankFactors(3.0, 3.0)}, 0.0)
    plan = slow.plan(config, world, Profiles(known))
    assert [len(plan.placement.experts_of(rank)) for rank in (0, 1)] == [5, 1]
    assert plan.batch_sizes == [15, 9]  # to make up for a sixth expert less
    again = slow.placed(world, plan.placement).plan(config, world, Profiles(known))
    assert again.placement == plan.placement


@pytest.mark.sizes(2)
def test_experts_move_at_the_end_of_an_epoch_and_the_run_goes_on(world, shared_path, monkeypatch):
    """The observer is told that it pays; training continues with other owners, exactly."""
    decided = []

    def moves_once(job, placement, steps):
        assert sum(job.tokens) == pytest.approx(2.0)
        if decided:
            return None
        decided.append(placement)
        return Replacement(placement, "2 experts move")

    monkeypatch.setattr(moves, "replace_experts", moves_once)
    owners = []
    assign = ExpertsLayout.assign

    def noted(layout, config, world, state, plan):
        owners.append(plan.placement.owners)
        assign(layout, config, world, state, plan)

    with mock.patch.object(ExpertsLayout, "assign", noted):
        settings = {
            "layout": "experts",
            "global_batch_size": 8,
            "epochs": 2,
            "benchmark_seconds": 0.1,
        }
        folder = str(shared_path / "run")
        with Training(make_task(data=Points(64)), run_dir=folder, **settings) as training:
            training.run()
    assert training.steps_done == 16
    assert len(owners) == 2
    experts = training.summary.experts
    if world.rank == 0:
        assert len(experts["by_rank"]) == 2
        assert sum(experts["token_fractions"]) == pytest.approx(1.0)
        assert len(experts["hidden_by_rank"]) == 2


@pytest.mark.thorough
@pytest.mark.sizes(2)
@pytest.mark.parametrize("balance", ["static", "adaptive", "off"])
def test_the_first_steps_calibrate_the_prediction_also_of_a_static_plan(
    world, balance, monkeypatch, capsys
):
    """What is observed is each rank's time by parts, and what is recorded is what follows of it."""
    calls = []

    def noted(job, placement, observed, is_first):
        calls.append(is_first)
        for seconds in zip(observed.dense_sec, observed.expert_sec, strict=True):
            assert min(seconds) > 0
            assert sum(seconds) < 2 * observed.step_sec
        return calibrate(job, placement, observed._replace(step_sec=100.0), is_first)

    monkeypatch.setattr(moves, "calibrate", noted)
    monkeypatch.setattr(moves, "replace_experts", lambda *_: None)
    settings = {"layout": "experts", "global_batch_size": 8, "epochs": 2, "balance": balance}
    settings["benchmark_seconds"] = 0.1
    with Training(make_task(data=Points(64)), progress="none", **settings) as training:
        training.run()
    predicted = training.summary.experts["predicted_step_sec"]
    shown = capsys.readouterr().out
    if balance == "off":
        assert calls == []
        assert predicted is None
    elif world.rank == 0:
        assert calls[0]
        assert not any(calls[1:])
        assert balance == "adaptive" or len(calls) == 1
        assert predicted == pytest.approx(100.0)
        assert "times as long as planned: predicted step 100000 ms" in shown


@pytest.mark.sizes(2)
def test_the_timeline_shows_chunks_that_travel_and_are_computed(world, shared_path):
    folder = shared_path / "run"
    settings = {"layout": "experts", "global_batch_size": 24, "max_steps": 2, "balance": "off"}
    given = {"expert_chunks": 2, "timeline": True, "quiet": True, "run_dir": str(folder)}
    with Training(make_task(data=Points(48)), **settings, **given) as training:
        training.run()
    if world.rank:
        return
    trace = read_trace(folder / NAME)
    check_trace(trace)
    lanes = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace
        if event["name"] == "thread_name"
    }
    shown = {(lanes[span["pid"], span["tid"]], span["name"]) for span in spans_of(trace)}
    for rank in (0, 1):
        assert {(f"tokens from rank {rank}", f"chunk {chunk}") for chunk in (0, 1)} <= shown
        assert {(f"outputs from rank {rank}", f"chunk {chunk}") for chunk in (0, 1)} <= shown
        assert {("experts", f"chunk {chunk} of rank {rank}") for chunk in (0, 1)} <= shown
    assert ("experts", "own tokens") in shown


class Counting(nn.Module):
    """An expert that counts the tokens that it has computed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("taken", torch.zeros(()))

    def forward(self, tokens):
        if self.training:
            self.taken += len(tokens)
        return self.linear(tokens)


@pytest.mark.thorough
def test_batch_norm_beside_experts_and_their_buffers_are_evaluated_on_any_ranks(world, shared_path):
    torch.manual_seed(5)
    mixture = Experts([Counting() for _ in range(4)], nn.Linear(8, 4), top_k=1)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), mixture, nn.Linear(8, 4)).double()
    task = make_task(model=model, data=Points(50), validation=Points(7))
    folder = shared_path / "run"
    settings = {"layout": "experts", "balance": "off", "micro_batch_size": 3, "epochs": 2}
    with Training(task, global_batch_size=20, run_dir=str(folder), **settings) as training:
        training.run()
    assert training.steps_done == 6
    assert training.summary.validation["loss"] > 0
    world.comm.Barrier()
    weights = torch.load(folder / "checkpoints" / "model.pt", weights_only=True)
    taken = [weights[f"2.experts.{number}.taken"] for number in range(4)]
    assert sum(taken) == 100  # every token of both epochs once
    assert weights["1.running_var"].min() > 0
