"""Changing plans and splitting shares into micro-batches keeps the weights and loses no sample."""

import copy
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import loops
import pytest
import torch
import torch.distributed as dist
from choices import by_default
from samples import BATCH, LENGTH, Points
from torch import nn

from kaitian_mpi.distributed import reducer as reducer_module
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.observe.run_folder import NoFolder
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.train.batch_norm import RunningStatistics
from kaitian_mpi.train.divergence import checksum_of, repair_divergence
from kaitian_mpi.train.rebalancing import Balancing
from kaitian_mpi.train.step_times import Call, StepExchange

pytestmark = pytest.mark.sizes(1, 3)


@pytest.mark.parametrize(("relay_dtype", "sums"), [("fp32", 1), ("bf16", 2)])
def test_the_loss_travels_with_the_gradients_unless_these_are_rounded(
    world, monkeypatch, relay_dtype, sums
):
    calls, own = [], []
    for module, name in ((dist, "all_reduce"), (reducer_module, "sum_gradients")):
        sums_of = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, call=sums_of, **k: calls.append(a) or call(*a, **k)
        )
    shares = loops.shares_of([1, 3, 0][: world.size])
    run = loops.Run(world, shares, micro_batch_size=2, relay_dtype=relay_dtype)
    computation = run.state.computation
    loss_of = computation.loss

    def noting(task, model, batch, counts):
        own.append((len(batch[0]), loss_of(task, model, batch, counts)))
        return own[-1][1]

    computation.loss = noting
    step = next(run.epoch())
    run.close()
    assert len(calls) == sums
    losses = gather_values(world.comm, [(n, loss.item()) for n, loss in own if n])
    counted = [pair for rank, pairs in enumerate(losses) if shares[rank] for pair in pairs]
    expected = sum(n * loss for n, loss in counted) / sum(n for n, _ in counted)
    assert step.mean_loss.item() == pytest.approx(expected, rel=1e-6)


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


@pytest.mark.parametrize(
    ("rest", "micro_batch_size"),
    by_default(
        itertools.product(range(4), (None, 2, 3)),
        [(0, 2), (1, None), (1, 3), (3, 2)],
    ),
)
def test_every_batch_is_large_enough_for_batch_norm(world, rest, micro_batch_size):
    shares = [5] + [2] * (world.size - 1)
    data, model = Points(2 * sum(shares) + rest), Batches()
    run = loops.Run(
        world, shares, model=model, data=data, micro_batch_size=micro_batch_size, min_batch=2
    )
    assert run.steps == 2 * (2 if rest < 2 else 3)
    assert [step.number for step in run.epoch()] == list(range(1, run.steps // 2 + 1))
    result = run.loop.evaluate()
    run.close()
    progress = run.loop.progress
    assert (progress.position, progress.step) == (len(data), run.steps // 2)
    assert math.isfinite(result["loss"])
    assert 2 <= min(model.trained)
    assert max(model.trained) <= max(micro_batch_size or 99, 3)
    assert sum(map(len, run.by_step())) == len(data)
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
        reports = exchange.swap(report(world.rank, step))
        times = reports.times
        columns = times.steps, times.samples, times.work_sec, times.wait_sec, *reports[1:]
        for values, expected_values in zip(columns, expected, strict=True):
            assert values.tolist() == list(expected_values)
            assert type(values.tolist()[0]) is type(expected_values[0])
    exchange.close()


def test_what_ranks_do_next_is_compared_beside_their_reports(world):
    exchange, size = StepExchange(world.comm), world.size
    for step in range(1, 4):
        exchange.announce(Call.TRAIN, step - 1)
        exchange.announce(Call.SUM, step - 1)
        exchange.swap([step] * 6)
        exchange.announce(Call.EVALUATE, step)
    if size > 1:
        calls = [Call.STOP, *[Call.BEGIN_EPOCH] * (size - 1)]
        with pytest.raises(AgreedError, match="after step 3: the end of the training on rank 0, t"):
            exchange.announce(calls[world.rank], 3)
    exchange.close()
    exchange.announce(Call.TRAIN, 3)


@pytest.mark.ranks(3)
def test_a_plan_applies_from_the_same_step_on_ranks_with_unlike_workers(world):
    """A rank without workers waits until those with some have used up what they fetched ahead."""
    run = loops.Run(world, loops.uneven(world), workers=world.rank % 2, balance="adaptive")
    plans = {2: loops.reverse(world), 5: loops.uneven(world), 6: loops.reverse(world)}
    balancing = Balancing(run.config, run.loop, NoFolder(), Sinks())
    balancing.observe = lambda number, reports: plans.get(number)
    run.loop.observers.append(balancing)
    for _ in range(2):
        for step in run.epoch():
            run.loop.step_done(step)
        balancing.epoch_ends()
        run.loop.progress.epoch_done(2)
    run.close()
    run.assert_each_sample_once()
    assert gather_values(world.comm, len(run.taken[-2])) == loops.reverse(world)


def test_pooled_statistics_equal_those_of_all_samples(world):
    """Of one batch a rank, with a momentum of 1; other buffers come from rank 0."""
    counts = [4 * (rank + 1) for rank in range(world.size)]
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(sum(counts), 5, generator=generator, dtype=torch.float64) * 3 + 1
    norm = nn.BatchNorm1d(5, momentum=1.0).double()
    model = nn.Sequential(norm)
    model.register_buffer("counter", torch.tensor(world.rank + 7))
    rank_rows = whole.split(counts)[world.rank]
    norm(rank_rows)
    # torch's running variance is unbiased; pooling applies to the biased one.
    norm.running_var.mul_((len(rank_rows) - 1) / len(rank_rows))
    RunningStatistics(model).pool(counts[world.rank] / sum(counts))
    assert torch.allclose(norm.running_mean, whole.mean(0), rtol=1e-12)
    assert torch.allclose(norm.running_var, whole.var(0, unbiased=False), rtol=1e-12)
    assert model.counter.item() == 7


def test_statistics_of_an_epoch_average_its_steps_before_momentum_applies():
    norm = nn.BatchNorm1d(1, momentum=0.25)
    statistics = RunningStatistics(nn.Sequential(norm))
    norm.running_mean.fill_(1000.0)  # from an epoch long ago
    for step, mean in enumerate([8.0, 2.0, 5.0]):
        statistics.before_step(step, 2, 2)
        statistics.before_batch(2)
        norm(torch.tensor([[mean - 1], [mean + 1]]))
    assert torch.allclose(norm.running_mean, torch.tensor([5.0]))
    statistics.before_step(100, 2, 2)
    statistics.before_batch(2)
    assert norm.momentum == 0.25


def running_mean(world, shares, micro_batch_size=None, plans=None):
    """Return the running mean of the inputs after two epochs."""
    # An evaluation would compute the statistics again.
    run = loops.Run(world, shares, micro_batch_size=micro_batch_size, evaluates=False)
    norm = nn.BatchNorm1d(3, momentum=0.2).double()

    def see(model, inputs):
        if model.training:  # not for ranks without samples, which only take part in the sum
            norm.running_mean += norm.momentum * (inputs[0].mean(0) - norm.running_mean)

    run.model.register_forward_pre_hook(see)
    run.state.statistics = RunningStatistics(nn.Sequential(norm))
    run.train(plans)
    run.state.statistics.pool(0.0)
    return norm.running_mean


def test_running_statistics_do_not_depend_on_plans_or_micro_batches(world):
    expected = running_mean(world, [BATCH] + [0] * (world.size - 1))
    plans = {2: loops.reverse(world), 9: loops.uneven(world), 11: loops.reverse(world)}
    means = running_mean(world, loops.uneven(world), 5, plans)
    assert (means - expected).abs().max() < 1e-12


@pytest.mark.parametrize("micro_batch_size", [None, 5])
def test_an_evaluation_uses_statistics_of_the_current_weights(world, micro_batch_size):
    shares = [BATCH - 4] + [0] * (world.size - 2) + [4] if world.size > 1 else [BATCH]
    norm = nn.BatchNorm1d(16)
    layers = (norm, nn.Dropout())
    run = loops.Run(world, shares, layers=layers, micro_batch_size=micro_batch_size, min_batch=2)
    for _ in run.epoch():
        pass
    random_state = torch.get_rng_state()
    run.loop.evaluate()
    run.close()
    assert torch.equal(torch.get_rng_state(), random_state)
    inputs, _ = Points()[list(range(LENGTH))]
    expected = run.model[0](inputs).mean(0)
    assert (norm.running_mean - expected).abs().max() < 1e-12


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


def replicas(world, off=(), unlike=()):
    """Train alone, alike on every rank; return the state, and the ranks' world.

    The ranks in `off` round differently; those in `unlike` say that they may.
    """
    infos = [
        replace(info, kind="", device_name="other" if info.world_rank in unlike else "one")
        for info in world.infos
    ]
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    task = replace(
        loops.classify_points(model), optimizer=lambda m: UlpOff(m.parameters(), lr=0.01)
    )
    state = loops.make_state(world, task)
    state.optimizers[0].is_off = world.rank in off
    for step in range(20):
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
    assert len(set(gather_values(world.comm, checksum_of(state.replicas())))) == 1
    own = world.rank not in repaired
    assert (state.model[1].running_mean[0] == world.rank) == own
    assert state.statistics.fractions == ([0.125] if own else None)
    return repaired


@pytest.mark.sizes(3)
@pytest.mark.parametrize("unlike", by_default([[0], [2], [1, 2]], [[0], [1, 2]]))
def test_what_unlike_devices_round_is_made_equal_without_a_word(world, unlike):
    state, world = replicas(world, off=unlike, unlike=unlike)
    kept = [tensor.clone() for tensor in state.replicas()]
    assert len(set(gather_values(world.comm, checksum_of(kept)))) == 2
    assert compare(world, state) == []
    most = next(rank for rank in range(3) if (rank in unlike) == (len(unlike) > 1))
    if world.rank == most:
        assert all(torch.equal(*pair) for pair in zip(kept, state.replicas(), strict=True))


FURTHER_UNLIKE = [pytest.param([rank], marks=pytest.mark.thorough) for rank in (0, 2)]


@pytest.mark.sizes(3)
@pytest.mark.parametrize("unlike", [[], [0, 1], *FURTHER_UNLIKE])
@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        *[("weights", 2), ("missing", 0), ("a bit", 2)],
        *by_default([("weights", 0), ("weights", 1), ("momentum", 2)], ()),
    ],
)
def test_a_rank_that_differs_by_more_is_named_whatever_its_device(world, part, wrong, unlike):
    """By a single bit, if the devices are equal."""
    if part == "a bit" and {wrong, 1} & {*unlike}:
        pytest.skip("these devices may round unlike the others")
    state, world = replicas(world, off=unlike, unlike=unlike)
    momentum = state.optimizers[0].state[state.model[2].weight]
    if world.rank == wrong and part == "missing":
        del momentum["exp_avg"]
    elif world.rank == wrong and part == "a bit":
        state.model[0].bias.data.view(torch.int32)[1] ^= 1
    elif world.rank == wrong:
        tensor = state.model[2].weight.data if part == "weights" else momentum["exp_avg"]
        tensor.mul_(1.01)
    assert compare(world, state) == [wrong]


# A step or an evaluation that does not come about is done again, and leaves no trace. What refuses
# here is the commit: it raises on every rank, as it does after a loss, and a new loop goes on from
# the same state.

COMMITS = loops.STEPS + 1  # of an epoch: its steps, and the evaluation


class Commit:
    """A commit that fails at some calls, counted from 0."""

    def __init__(self, refused=()):
        self.refused, self.calls = refused, 0

    def __call__(self, succeeded):
        assert succeeded
        call, self.calls = self.calls, self.calls + 1
        if call in self.refused:
            raise loops.RefusedError("planted")


def with_norm(world, commit=None, **settings):
    # Over four numbers of a sample, so that even a single sample has statistics.
    norm = nn.Unflatten(1, (4, 4)), nn.BatchNorm1d(4), nn.Flatten()
    return loops.Run(world, loops.uneven(world), layers=norm, commit=commit, **settings)


def momenta(run):
    of_parameters = run.state.optimizers[0].state.values()
    return torch.cat([value["momentum_buffer"].flatten() for value in of_parameters])


def assert_same(run, other):
    run.assert_each_sample_once()
    assert run.by_step() == other.by_step()
    assert (run.weights() - other.weights()).abs().max() < 1e-12
    assert (momenta(run) - momenta(other)).abs().max() < 1e-12
    for one, another in zip(run.model.buffers(), other.model.buffers(), strict=True):
        assert (one - another).abs().max() < 1e-12
    assert {m.momentum for m in run.model.modules() if isinstance(m, nn.BatchNorm1d)} <= {0.1}
    ours, theirs = (copy.copy(vars(r.state.progress)) for r in (run, other))
    for name in ("training_sec", "timed_steps", "timed_samples"):  # of the steps with a reading
        del ours[name], theirs[name]
    assert ours == theirs
    for one, another in zip(run.results, other.results, strict=True):
        assert one["accuracy"] == another["accuracy"]
        assert one["loss"] == pytest.approx(another["loss"], abs=1e-12)


PLACES = {
    "nowhere": [], "the first step": [0], "in mid-epoch": [3], "the same step twice": [3, 4],
    "the last, partial step": [loops.STEPS - 1], "the evaluation": [loops.STEPS],
    "the second epoch's first step": [COMMITS], "the last evaluation": [2 * COMMITS - 1],
    "several": [1, 5, loops.STEPS + 2, COMMITS + 5],
}  # fmt: skip


FURTHER_PLACES = {
    *("nowhere", "the first step", "in mid-epoch", "the second epoch's first step"),
    "the last evaluation",
}


@pytest.fixture(scope="module")
def unrefused(world):
    return with_norm(world).train()


@pytest.mark.sizes(3)
@pytest.mark.parametrize(
    "refused",
    [
        pytest.param(steps, marks=pytest.mark.thorough if name in FURTHER_PLACES else (), id=name)
        for name, steps in PLACES.items()
    ],
)
def test_a_refused_step_is_repeated_without_a_trace(world, unrefused, refused):
    commit = Commit(refused)
    run = with_norm(world, commit).train()
    assert run.refusals == len(refused)
    assert refused or commit.calls == loops.EPOCHS * COMMITS
    assert_same(run, unrefused)


@pytest.mark.sizes(3)
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_recovery_is_exact_with_micro_batches_workers_and_another_split(world, workers):
    commit = Commit([2, COMMITS + 3])
    run = with_norm(world, commit, micro_batch_size=5, workers=workers).train()
    assert run.refusals == 2
    assert_same(run, with_norm(world, micro_batch_size=5).train())
    run = loops.Run(world, loops.uneven(world), commit=Commit([4]), workers=workers)
    run.train(other_shares=loops.reverse(world))
    assert run.refusals == 1
    assert_same(run, loops.Run(world, loops.uneven(world)).train())
    sizes = [len(indices) for indices in run.taken[3:5]]
    assert sizes == [loops.uneven(world)[world.rank], loops.reverse(world)[world.rank]]
