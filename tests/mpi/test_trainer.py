"""Changing plans and splitting shares into micro-batches keeps the weights and loses no sample."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from samples import BATCH, LENGTH, Points
from torch import nn

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.distributed import reducer as reducer_module
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.observe.run_folder import NoFolder
from kaitian_mpi.recipes.datasets.sources import DataSource
from kaitian_mpi.recipes.image_classification import classify
from kaitian_mpi.train.batch_norm import RunningStatistics
from kaitian_mpi.train.data.loader import ShareLoader
from kaitian_mpi.train.divergence import fingerprint, repair_divergence
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.measure.plan import Plan
from kaitian_mpi.train.progress import count_steps
from kaitian_mpi.train.rebalancing import make_balancing
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import State
from kaitian_mpi.train.step import StepExchange, StepObserver
from kaitian_mpi.train.task import Computation

pytestmark = pytest.mark.sizes(1, 3)


def make_plan(world, shares, micro_batch_size=None, min_batch=1):
    scores = [1.0] * world.size
    return Plan(shares, scores, None, "contiguous", "fp32", micro_batch_size, min_batch=min_batch)


def make_setup(config, model, data):
    task = classify(config, model, DataSource("points", data, data, 4))
    return Setup(task, NoFolder())


def make_state(world, setup, steps=10):
    return State(setup.task, Computation(world.device, "fp32", "contiguous"), steps)


def steps_of(loop):
    """Train the steps of an epoch."""
    while (parts := loop.fetch()) is not None:
        yield loop.train(parts)


def note_samples(loop, taken):
    """Append this rank's samples of each completed step."""
    train_on = loop.train

    def noted(parts):
        step = train_on(parts)
        numbers = [(inputs[:, 0] * LENGTH).round().long().tolist() for _, (inputs, _) in parts]
        taken.append(list(itertools.chain(*numbers)) if parts[0].samples else [])
        return step

    loop.train = noted


def make_loop(world, shares, micro_batch_size=None, workers=0, layers=(), min_batch=1, **settings):
    config = TrainConfig(
        global_batch_size=BATCH, epochs=2, workers=workers, log_interval=60, lr=0.1, **settings
    )
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 16), *layers, nn.Tanh(), nn.Linear(16, 4)).double()
    setup = make_setup(config, model, Points())
    plan = make_plan(world, shares, micro_batch_size, min_batch)
    state = make_state(world, setup, count_steps(config, LENGTH, BATCH))
    loader = ShareLoader(setup.train, workers, pin_memory=False)
    return Loop(config, world, setup, state, plan, loader)


def train(loop, plans=None):
    """Train two epochs, setting plans by step. Return this rank's samples, and the weights."""
    taken = []
    note_samples(loop, taken)
    for _ in range(2):
        for step in steps_of(loop):
            if step.number in (plans or {}):
                loop.sampler.set_plan(plans[step.number])
        loop.progress.epoch_done(2)
    loop.close()
    weights = torch.cat([p.detach().flatten() for p in loop.state.model.parameters()])
    return taken, weights


@pytest.mark.parametrize(("relay_dtype", "sums"), [("fp32", 1), ("bf16", 2)])
def test_the_loss_travels_with_the_gradients_unless_these_are_rounded(
    world, monkeypatch, relay_dtype, sums
):
    calls = []
    for module, name in ((dist, "all_reduce"), (reducer_module, "sum_gradients")):
        sums_of = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, call=sums_of, **k: calls.append(a) or call(*a, **k)
        )
    shares = shares_of(world, [1, 3, 0][: world.size])
    loop = make_loop(world, shares, micro_batch_size=2, relay_dtype=relay_dtype)
    own = []
    loss_of = loop._computation.loss
    loop._computation.loss = lambda task, model, batch, counts: (
        own.append((len(batch[0]), loss_of(task, model, batch, counts))) or own[-1][1]
    )
    step = next(steps_of(loop))
    loop.close()
    assert len(calls) == sums
    losses = gather_values(world.comm, [(n, loss.item()) for n, loss in own if n])
    counted = [pair for rank, pairs in enumerate(losses) if shares[rank] for pair in pairs]
    expected = sum(n * loss for n, loss in counted) / sum(n for n, _ in counted)
    assert step.mean_loss.item() == pytest.approx(expected, rel=1e-6)


def shares_of(world, weights):
    shares = [BATCH * w // sum(weights) for w in weights]
    shares[0] += BATCH - sum(shares)
    return shares


def uneven(world):
    return shares_of(world, [rank + 1 for rank in range(world.size)])


def reverse(world):
    return shares_of(world, [world.size - rank for rank in range(world.size)])


def by_step(world, taken):
    """Return the samples of all ranks, by step."""
    ranks = gather_values(world.comm, taken)
    return [sorted(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.sizes(3))])
def test_changing_plans_in_mid_epoch_loses_and_repeats_no_sample(world, workers):
    steps = math.ceil(LENGTH / BATCH)
    expected, weights = train(make_loop(world, uneven(world)))
    plans = {2: reverse(world), 5: uneven(world), steps + 1: reverse(world)}
    taken, other = train(make_loop(world, uneven(world), workers=workers), plans)
    assert by_step(world, taken) == by_step(world, expected)
    for epoch in range(2):
        of_epoch = by_step(world, taken)[epoch * steps : (epoch + 1) * steps]
        assert sorted(itertools.chain(*of_epoch)) == list(range(LENGTH))
    assert (other - weights).abs().max() < 1e-12
    if world.size > 1:
        # Batches that workers have already fetched follow the previous plan on every rank.
        ahead = 2 * workers
        sizes = [len(indices) for indices in taken]
        assert sizes[1 + ahead] == uneven(world)[world.rank]
        assert sizes[2 + ahead] == reverse(world)[world.rank]


class Batches(nn.Module):
    """Records the sizes of its batches and cannot train on a batch of one."""

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(8)
        self.layers = nn.Sequential(nn.Linear(3, 8), norm, nn.Tanh(), nn.Linear(8, 4)).double()
        self.trained, self.evaluated = [], []

    def forward(self, x):
        (self.trained if self.training else self.evaluated).append(len(x))
        return self.layers(x)


@pytest.mark.parametrize("micro_batch_size", [None, 2, 3])
@pytest.mark.parametrize("rest", [0, 1, 2, 3])
def test_every_batch_is_large_enough_for_batch_norm(world, rest, micro_batch_size):
    shares = [5] + [2] * (world.size - 1)
    length = 2 * sum(shares) + rest
    data, model = Points(length), Batches()
    config = TrainConfig(global_batch_size=sum(shares), epochs=2, log_interval=60)
    setup = make_setup(config, model, data)
    plan = Plan(
        shares, [1.0] * world.size, None, "contiguous", "fp32", micro_batch_size, min_batch=2
    )
    steps = count_steps(config, length, sum(shares), 2)
    assert steps == 2 * (2 if rest < 2 else 3)
    state = make_state(world, setup, steps)
    loader = ShareLoader(setup.train, 0, pin_memory=False)
    loop = Loop(config, world, setup, state, plan, loader)
    taken = []
    note_samples(loop, taken)
    assert [step.number for step in steps_of(loop)] == list(range(1, steps // 2 + 1))
    result = loop.evaluate()
    assert (loop.progress.position, loop.progress.step) == (length, steps // 2)
    assert math.isfinite(result["loss"])
    assert 2 <= min(model.trained)
    assert max(model.trained) <= max(micro_batch_size or 99, 3)
    trained = gather_values(world.comm, sum(map(len, taken)))
    assert sum(trained) == length
    # An evaluation does not use larger batches than fit the memory in training.
    assert max(model.evaluated, default=0) <= (micro_batch_size or 64)


def test_reports_arrive_on_all_ranks_a_step_later(world):
    def report(rank, step):
        wants_one = rank == world.size - 1 and step == 2
        return step, rank + 7, 0.25 * rank, 1 / 3, step / 7, wants_one

    exchange = StepExchange(world.comm)
    assert exchange.swap(report(world.rank, 1)) is None
    for step in (2, 3, 4):
        expected = zip(*(report(rank, step - 1) for rank in range(world.size)), strict=True)
        found = exchange.swap(report(world.rank, step))
        times = found.times.steps, found.times.samples, found.times.work_sec, found.times.wait_sec
        for values, own in zip((*times, *found[1:]), expected, strict=True):
            assert values.tolist() == list(own)
            assert type(values.tolist()[0]) is type(own[0])
    exchange.close()


def test_a_requested_checkpoint_is_due_after_the_same_step_on_all_ranks(world):
    loop = make_loop(world, uneven(world))
    due = []

    class Requests(StepObserver):
        def wants_checkpoint(self):
            return world.rank == 0 and loop.progress.step == 3

        def step_done(self, step, reports):
            due.append(reports is not None and any(reports.wants_checkpoint))

    loop.observers.append(Requests())
    for step in steps_of(loop):
        loop.step_done(step)
    loop.close()
    assert [number for number, is_due in enumerate(due, 1) if is_due] == [4]


@pytest.mark.ranks(3)
def test_a_plan_applies_from_the_same_step_on_ranks_with_unlike_workers(world):
    """A rank without workers waits until those with some have used up what they fetched ahead."""
    loop = make_loop(world, uneven(world), workers=world.rank % 2)
    config = replace(loop._config, balance="adaptive")
    plans = {2: reverse(world), 5: uneven(world), 6: reverse(world)}
    taken = []
    note_samples(loop, taken)
    balancing = make_balancing(config, loop, NoFolder())
    balancing.observe = lambda number, reports: plans.get(number)
    loop.observers.append(balancing)
    for _ in range(2):
        for step in steps_of(loop):
            loop.step_done(step)
        balancing.epoch_ends()
        loop.progress.epoch_done(2)
    loop.close()
    steps = by_step(world, taken)
    half = len(steps) // 2
    for epoch in (steps[:half], steps[half:]):
        assert sorted(itertools.chain(*epoch)) == list(range(LENGTH))
    assert gather_values(world.comm, len(taken[-2])) == reverse(world)


def running_mean(world, shares, micro_batch_size=None, plans=None):
    """Return the running mean of the inputs after two epochs."""
    loop = make_loop(world, shares, micro_batch_size)
    norm = nn.BatchNorm1d(3, momentum=0.2).double()

    def see(model, inputs):
        if model.training:  # not for ranks without samples, which only take part in the sum
            norm.running_mean += norm.momentum * (inputs[0].mean(0) - norm.running_mean)

    loop.state.model.register_forward_pre_hook(see)
    loop.state.statistics = RunningStatistics(nn.Sequential(norm))
    train(loop, plans)
    loop.state.statistics.pool(0.0)
    return norm.running_mean


def test_running_statistics_do_not_depend_on_plans_or_micro_batches(world):
    expected = running_mean(world, [BATCH] + [0] * (world.size - 1))
    plans = {2: reverse(world), 9: uneven(world), 11: reverse(world)}
    found = running_mean(world, uneven(world), 5, plans)
    assert (found - expected).abs().max() < 1e-12


@pytest.mark.parametrize("micro_batch_size", [None, 5])
def test_an_evaluation_uses_statistics_of_the_current_weights(world, micro_batch_size):
    shares = [BATCH - 4] + [0] * (world.size - 2) + [4] if world.size > 1 else [BATCH]
    norm = nn.BatchNorm1d(16)
    layers = (norm, nn.Dropout())
    loop = make_loop(world, shares, micro_batch_size, layers=layers, min_batch=2)
    for _ in steps_of(loop):
        pass
    random_state = torch.get_rng_state()
    loop.evaluate()
    assert torch.equal(torch.get_rng_state(), random_state)
    inputs, _ = Points()[list(range(LENGTH))]
    expected = loop.state.model[0](inputs).mean(0)
    assert (norm.running_mean - expected).abs().max() < 1e-12


@pytest.mark.ranks(2)
def test_a_repair_keeps_the_running_statistics_of_healthy_ranks(world):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    state = make_state(world, make_setup(TrainConfig(), model, Points()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        model[1].running_mean.fill_(world.rank)
        model[0].weight[0, 0] += world.rank == 1
    state.statistics.fractions = [0.125]
    assert repair_divergence(world, state) == [1]
    assert model[0].weight[0, 0] == 1
    broken = world.rank == 1
    assert model[1].running_mean.tolist() == [0 if broken else world.rank] * 4
    assert state.statistics.fractions == (None if broken else [0.125])


class UlpOff(torch.optim.AdamW):
    """Rounds unlike the others on one rank: the last bit of the weights and of its state."""

    is_off = False

    @torch.no_grad()
    def step(self):
        super().step()
        for values in ([p, *self.state[p].values()] for p in self.param_groups[0]["params"]):
            for tensor in values:
                if self.is_off and tensor.ndim:
                    tensor.mul_(1 + 2 * torch.finfo(tensor.dtype).eps)


def replicas(world, off=(), unlike=(), steps=20):
    """Train some steps alone, alike on every rank; return the state, and the ranks' world.

    Args:
        world: the ranks.
        off: those that round differently.
        unlike: those that say that they may.
        steps: how many.
    """
    infos = [
        replace(info, kind="", device_name="other" if info.world_rank in unlike else "one")
        for info in world.infos
    ]
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    setup = make_setup(TrainConfig(), model, Points())
    task = replace(setup.task, optimizer=lambda m: UlpOff(m.parameters(), lr=0.01))
    state = make_state(world, replace(setup, task=task))
    state.optimizers[0].is_off = world.rank in off
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape)
        state.optimizers[0].step()
        state.progress.step = step + 1
    model[1].running_mean.fill_(world.rank)
    state.statistics.fractions = [0.125]
    return state, replace(world, infos=tuple(infos))


def compare(world, state):
    """Return which ranks were repaired; afterwards all have the same bits."""
    told = []
    sinks = SimpleNamespace(event=lambda *parts: told.append(parts))
    repaired = repair_divergence(world, state, sinks)
    assert [ranks for *_, ranks in told] == ([repaired] if repaired else [])
    assert len(set(gather_values(world.comm, fingerprint(state.replicas())))) == 1
    own = world.rank not in repaired
    assert (state.model[1].running_mean[0] == world.rank) == own
    assert state.statistics.fractions == ([0.125] if own else None)
    return repaired


@pytest.mark.sizes(3)
@pytest.mark.parametrize("unlike", [[0], [2], [1, 2]])
def test_what_unlike_devices_round_is_made_equal_without_a_word(world, unlike):
    state, world = replicas(world, off=unlike, unlike=unlike)
    kept = [tensor.clone() for tensor in state.replicas()]
    assert len(set(gather_values(world.comm, fingerprint(kept)))) == 2
    assert compare(world, state) == []
    most = next(rank for rank in range(3) if (rank in unlike) == (len(unlike) > 1))
    if world.rank == most:
        assert all(torch.equal(*pair) for pair in zip(kept, state.replicas(), strict=True))


@pytest.mark.sizes(3)
@pytest.mark.parametrize("wrong", [0, 1, 2])
@pytest.mark.parametrize("unlike", [[], [0], [2], [0, 1]])
@pytest.mark.parametrize("part", ["weights", "momentum", "missing"])
def test_a_rank_that_differs_by_more_is_named_whatever_its_device(world, wrong, unlike, part):
    state, world = replicas(world, off=unlike, unlike=unlike)
    momentum = state.optimizers[0].state[state.model[2].weight]
    if world.rank == wrong and part == "missing":
        del momentum["exp_avg"]
    elif world.rank == wrong:
        tensor = state.model[2].weight.data if part == "weights" else momentum["exp_avg"]
        tensor.mul_(1.01)
    assert compare(world, state) == [wrong]


@pytest.mark.sizes(3)
@pytest.mark.parametrize("unlike", [[0], []])
def test_a_single_bit_among_equal_devices_is_a_difference(world, unlike):
    state, world = replicas(world, off=unlike, unlike=unlike)
    if world.rank == 2:
        state.model[0].bias.data.view(torch.int32)[1] ^= 1
    assert compare(world, state) == [2]


@pytest.mark.ranks(2)
def test_ranks_that_are_behind_get_the_state_and_others_keep_theirs(world):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    state = make_state(world, make_setup(TrainConfig(), model, Points()))
    model[1].running_mean.fill_(world.rank)
    state.progress.step, state.is_begun = 7, world.rank > 0
    assert state.sync_to_latest(world) == 1
    assert model[1].running_mean.tolist() == [max(1, world.rank)] * 4
    assert state.progress.step == 7
