"""The training state: what is saved, what is restored, and what is rolled back."""

import collections
import itertools
import json
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.distributed.sync_batch_norm import convert_sync_batchnorm
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.tensor_files import TensorFile
from kaitian_mpi.recipes.image_classification import make_optimizer
from kaitian_mpi.train import observers
from kaitian_mpi.train.batch_norm import RunningStatistics
from kaitian_mpi.train.engine import apply_step, set_learning_rates
from kaitian_mpi.train.progress import Progress, count_steps
from kaitian_mpi.train.state import State, load_pooled_statistics
from kaitian_mpi.train.state_transfer import from_bytes, named_as, to_bytes
from kaitian_mpi.train.step import Step
from kaitian_mpi.train.step_times import StepTimes
from kaitian_mpi.train.task import Computation, Task

BUFFERS = {
    "short": torch.tensor([[0.1, -3.0, 1e30], [1e-30, 7.0, float("inf")]], dtype=torch.bfloat16),
    "whole": torch.tensor([0, -1, 2**53 + 1, 2**62 + 12345, -(2**63) + 1]),
    "switch": torch.tensor([True, False]),
    "fine": torch.tensor(1 / 3, dtype=torch.float64),
    "unsaved": torch.tensor([1.5, -2.5]),
    "turns": torch.tensor([1 - 2j, 0.5j]),
    "fine_turns": torch.tensor([1 / 3 - 1j, 1j / 3], dtype=torch.complex128),
}


class Buffered(nn.Module):
    """Weights, batch norm and buffers of several types."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        for name, value in BUFFERS.items():
            self.register_buffer(name, torch.zeros_like(value), persistent=name != "unsaved")

    def forward(self, x):
        return self.norm(self.linear(x))


def state_of(model, optimizer, total_steps=20, **parts):
    task = Task(model=model, data=[0], optimizer=optimizer, **parts)
    return State(task, Computation(torch.device("cpu"), "fp32", "contiguous"), total_steps)


def make_state(seed=0, **settings):
    torch.manual_seed(seed)
    return state_of(Buffered(), partial(make_optimizer, TrainConfig(**{"lr": 0.1, **settings})))


def train(state, steps=3):
    for _ in range(steps):
        state.model(torch.randn(8, 4)).square().sum().backward()
        state.optimizers[0].step()
        state.zero_gradients()
        state.progress.step_done(8)


def fill_buffers(model):
    for name, value in BUFFERS.items():
        getattr(model, name).copy_(value)


def load_saved(other, state):
    """Have a state load what another one saves."""
    other.load_shared(from_bytes(to_bytes(state.shared())))


def copies(values):
    return [value.detach().clone() for value in values]


def parameters(state):
    return copies(state.model.parameters())


def buffers(state):
    return copies(state.model.buffers())


def equal(some, others):
    return all(
        one.dtype == other.dtype and torch.equal(one, other)
        for one, other in zip(some, others, strict=True)
    )


def test_shared_state_is_restored_with_momentum_but_not_a_jobs_own_settings():
    state, other = make_state(), make_state(seed=1)
    train(state)
    fill_buffers(state.model)
    rank_state = from_bytes(to_bytes(state.rank_state()))
    expected = torch.rand(5)
    torch.manual_seed(77)
    other.load_rank_state(rank_state)
    assert equal(buffers(state), buffers(other))
    assert torch.equal(torch.rand(5), expected)
    state.progress.epoch, state.progress.bad_steps = 2, 1
    assert not equal(parameters(state), parameters(other))
    load_saved(other, state)
    assert equal(parameters(state), parameters(other))
    assert other.is_begun
    assert other.progress == state.progress
    kept, loaded = (
        [of["momentum_buffer"] for of in either.optimizers[0].state.values()]
        for either in (state, other)
    )
    assert len(kept) == 4
    assert equal(kept, loaded)
    assert all(momentum.any() for momentum in kept)
    for either in (state, other):
        torch.manual_seed(5)
        train(either)
    assert equal(parameters(state), parameters(other))
    state = make_state(lr=7.0, momentum=0.1, nesterov=False, weight_decay=0.3)
    other = make_state()
    train(state)
    other.progress.total_steps = 99
    before = [dict(group, params=None) for group in other.optimizers[0].param_groups]
    load_saved(other, state)
    assert [dict(group, params=None) for group in other.optimizers[0].param_groups] == before
    assert len(other.optimizers[0].state) == 4, "the momentum is the checkpoint's"
    assert other.progress.total_steps == 99
    another = state_of(nn.Linear(4, 2), partial(make_optimizer, TrainConfig()))
    with pytest.raises(UserError, match="the checkpoint is of another model"):
        another.load_shared(state.shared())


def test_only_a_transaction_that_is_not_committed_is_rolled_back():
    state = make_state()
    fill_buffers(state.model)
    for is_committed in (False, True):
        before = buffers(state)
        state.buffers.save()
        for name in BUFFERS:
            getattr(state.model, name).zero_()
        after = buffers(state)
        if is_committed:
            state.buffers.commit()
        state.restore()
        assert equal(after if is_committed else before, buffers(state))


def test_statistics_lag_in_a_short_epoch_and_new_ranks_get_those_of_all_samples():
    norm, half = nn.BatchNorm1d(2), nn.BatchNorm1d(2, momentum=0.5)
    for layers, steps, lags in (
        *(([norm], 0, False), ([norm], 1, True), ([norm], 49, True), ([norm], 50, False)),
        *(([half, nn.BatchNorm2d(3)], 49, True), ([half], 10, False)),
        ([nn.BatchNorm1d(2, momentum=None)], 1, False),
        ([nn.BatchNorm1d(2, track_running_stats=False)], 1, False),
        ([nn.SyncBatchNorm(2), norm], 1, False),
        ([convert_sync_batchnorm(nn.BatchNorm1d(2))], 1, True),
        ([nn.Linear(2, 2), nn.LayerNorm(2)], 1, False),
    ):
        assert RunningStatistics(nn.Sequential(*layers)).lag(steps) is lags
    shares = [5, 1, 10]
    samples = torch.randn(sum(shares), 3, dtype=torch.float64) * 3 + 7
    state, other, own = make_state(), make_state(seed=1), []
    for rank, part in enumerate(samples.split(shares)):
        state.model.norm.running_mean.copy_(part.mean(0))
        state.model.norm.running_var.copy_(part.var(0, correction=0))
        state.model.whole.fill_(rank)
        own.append(from_bytes(to_bytes(state.rank_state())))
    load_pooled_statistics(other, own, shares)
    pooled, variance = other.model.norm, samples.var(0, correction=0)
    torch.testing.assert_close(pooled.running_mean.double(), samples.mean(0))
    torch.testing.assert_close(pooled.running_var.double(), variance, rtol=1e-5, atol=1e-4)
    assert other.model.whole.tolist() == [0] * 5, "what cannot be pooled is the first rank's"


HALF_WAY = {"step": 15, "epoch": 1, "position": 50}


def test_total_steps_are_done_plus_remaining_and_the_schedule_counts_samples():
    for done, epochs, max_steps, batch, steps in (
        *(({}, 4, 0, 25, 16), ({}, 4, 0, 30, 16), ({}, 4, 7, 30, 7), ({}, 4, 70, 30, 16)),
        # half of the second epoch was done in steps of 10; what is left is in steps of 25
        *((HALF_WAY, 4, 0, 25, 15 + 2 + 8), (HALF_WAY, 4, 16, 25, 16), (HALF_WAY, 4, 5, 25, 15)),
        *((HALF_WAY, 1, 0, 25, 15), ({"step": 10, "epoch": 0, "position": 100}, 1, 0, 25, 10)),
        *(({}, 0, 7, 25, 7), ({}, 0, 70, 30, 70), ({"step": 40, "epoch": 10}, 0, 41, 25, 41)),
        *(({"step": 40, "epoch": 4}, 4, 0, 25, 40), ({"step": 40, "epoch": 4}, 6, 0, 25, 48)),
    ):
        config = TrainConfig(epochs=epochs, max_steps=max_steps)
        assert count_steps(config, 100, batch, 1, Progress(0, **done)) == steps
    for batch in (10, 20, 50):
        progress = Progress(0)
        for step in range(400 // batch):
            done = progress.fraction_done(TrainConfig(epochs=4), batch, 100)
            assert done == batch * (step + 0.5) / 400
            progress.step_done(batch)
    progress = Progress(0, step=15, epoch=1, position=50, samples=150)
    for flags, done in (
        ({"epochs": 4}, 175 / 400),
        ({"epochs": 4, "max_steps": 20}, 15.5 / 20),
        ({"epochs": 1}, 1.0),
        ({"epochs": 0, "max_steps": 20}, 15.5 / 20),
    ):
        assert progress.fraction_done(TrainConfig(**flags), 50, 100) == done


STEPS = 12


class Counter:
    """Extra state of any value."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def scheduled(make_scheduler, total_steps=STEPS, lr=0.1, weight_decay=0.0, extra=None):
    """Return a state with a scheduler."""

    def optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay)

    parts = {"scheduler": make_scheduler, "extra_state": extra}
    return state_of(nn.Linear(2, 1), optimizer, total_steps, **parts)


def trained(*arguments, steps, **settings):
    """Return a state with a scheduler, after some steps."""
    rates(state := scheduled(*arguments, **settings), steps)
    return state


def rates(state, steps):
    """Train, and return the learning rate of each step."""
    learning_rates = []
    for _ in range(steps):
        set_learning_rates(TrainConfig(), state, 1, 1)
        learning_rates.append(state.progress.learning_rate)
        state.model(torch.randn(8, 2)).square().sum().backward()
        apply_step(state._schedules._task, state, True, 8)
    return learning_rates


def resumed(state, *arguments, **settings):
    """Return another job's state, after it has loaded this one."""
    other = scheduled(*arguments, **settings)
    other.check_restorable()
    load_saved(other, state)
    return other


def one_cycle(optimizer, steps):
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)


def two_in_sequence(optimizer, steps):
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    second = lr_scheduler.CosineAnnealingLR(optimizer, steps - 3)
    return lr_scheduler.SequentialLR(optimizer, [first, second], [3])


def two_side_by_side(optimizer, steps):
    last = lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    return [lr_scheduler.ExponentialLR(optimizer, 0.9), last]


def of_a_closure(optimizer, steps):
    return lr_scheduler.LambdaLR(optimizer, lambda k: 0.5 * (1 + numpy.cos(numpy.pi * k / steps)))


SCHEDULERS = lr_scheduler.CosineAnnealingLR, one_cycle, of_a_closure, two_in_sequence
SCHEDULERS += (two_side_by_side,)


@pytest.mark.parametrize("make_scheduler", SCHEDULERS)
def test_an_interrupted_run_continues_its_schedule_bit_by_bit_and_a_finished_one_that_of_more_steps(
    make_scheduler,
):
    expected = rates(scheduled(make_scheduler), STEPS)
    state, made = trained(make_scheduler, steps=5), []

    def noted(optimizer, steps):
        made.append(steps)
        return make_scheduler(optimizer, steps)

    assert rates(resumed(state, noted), STEPS - 5) == expected[5:]
    assert made == [STEPS], "nothing has changed, so the scheduler's own state is loaded"
    expected = rates(scheduled(make_scheduler, 2 * STEPS), 2 * STEPS)
    more = resumed(trained(make_scheduler, steps=STEPS), make_scheduler, total_steps=2 * STEPS)
    assert rates(more, STEPS) == pytest.approx(expected[STEPS:])


def halved(optimizer):
    return lr_scheduler.StepLR(optimizer, 2, 0.5)


def test_settings_that_the_script_has_changed_are_resumed_and_the_others_are_of_the_job():
    state = scheduled(None, weight_decay=0.1)
    state.optimizers[0].param_groups[0]["lr"] = 0.05  # as a scheduler of the script's own does
    other = resumed(state, None, weight_decay=0.2)
    (group,) = other.optimizers[0].param_groups
    assert (group["lr"], group["weight_decay"]) == (0.05, 0.2)
    # Also in a third job, which begins with what the first one began with.
    (group,) = resumed(other, None, weight_decay=0.2).optimizers[0].param_groups
    assert (group["lr"], group["weight_decay"]) == (0.05, 0.2)


def test_settings_of_a_resumed_job_apply_under_a_scheduler_with_a_state():
    expected = rates(scheduled(halved, lr=0.4), 9)
    other = resumed(trained(halved, lr=0.1, steps=5), halved, lr=0.4, weight_decay=0.3)
    assert rates(other, 4) == pytest.approx(expected[5:])
    assert other.optimizers[0].param_groups[0]["weight_decay"] == 0.3


def test_schedulers_follow_a_change_of_the_number_of_steps_while_training_or_say_they_cannot():
    expected = rates(scheduled(one_cycle, 20), 20)
    state = trained(one_cycle, steps=5)
    state.progress.bad_steps += 1  # a step that was skipped has moved no scheduler
    state.progress.step += 1
    state.set_total_steps(20)
    assert rates(state, 15) == pytest.approx(expected[5:])
    with pytest.raises(UserError, match="cannot continue at step 8 of 12"):
        resumed(trained(one_cycle, steps=8), lambda o, steps: one_cycle(o, steps - 5))


def test_a_learning_rate_may_be_a_tensor_or_a_number_of_numpys():
    for kind, make_scheduler in itertools.product(
        (torch.tensor, numpy.float32, numpy.float64), (None, halved)
    ):
        expected = rates(scheduled(make_scheduler, lr=kind(0.1)), 6)
        assert [type(rate) for rate in expected] == [float] * 6
        state = trained(make_scheduler, lr=kind(0.1), steps=3)
        json.dumps(asdict(state.progress))
        other = resumed(state, make_scheduler, lr=kind(0.1))
        assert rates(other, 3) == pytest.approx(expected[3:])


def test_extra_state_is_saved_as_plain_values_and_what_cannot_be_is_found_before_training():
    for value, saved in (
        (numpy.float64(0.5), 0.5), ({numpy.int64(1): [numpy.bool_(True)]}, {1: [True]}),
        (collections.Counter("aab"), {"a": 2, "b": 1}), (torch.Size([1, 2]), (1, 2)),
    ):  # fmt: skip
        state = scheduled(None, extra=Counter(value))
        state.check_restorable()
        loaded = from_bytes(to_bytes(state.shared()))["extra"]["extra_state"]["value"]
        assert (type(loaded), loaded) == (type(saved), saved)
    for value, message in (
        *(({1, 2}, VALUE), ([object()], VALUE), (numpy.zeros(2), VALUE)),
        (torch.ones(2).as_subclass(OwnTensor), OF_A_CLASS),
    ):
        with pytest.raises(UserError, match=message):
            scheduled(None, extra=Counter(value)).check_restorable()


class OwnTensor(torch.Tensor):
    """Not loaded by a safe torch.load."""


VALUE = r"Task: extra_state\['extra_state'\]\['value'\].* is a"
OF_A_CLASS = "state_dict of extra_state cannot be saved and loaded"


def compiled(model, form):
    if form == "whole":
        return torch.compile(model, backend="eager")
    if form == "part":
        model.norm = torch.compile(model.norm, backend="eager")
    return model


@pytest.mark.parametrize(
    ("before", "now"), list(itertools.permutations(["no", "whole", "part"], 2))
)
def test_a_run_is_resumed_with_torch_compile_or_without(before, now):
    def state_with(form, seed):
        torch.manual_seed(seed)
        model = compiled(Buffered(), form)
        average = torch.optim.swa_utils.AveragedModel(model)
        sgd = partial(make_optimizer, TrainConfig(lr=0.1))
        return state_of(model, sgd, extra_state={"average": average}), model

    state, model = state_with(before, seed=0)
    model(torch.ones(5, 4)).sum().backward()
    task = Task(model=model, data=[0], optimizer=lambda m: state.optimizers)
    apply_step(task, state, True, 5)
    next(model.parameters()).requires_grad_(False)
    saved = from_bytes(to_bytes(state.shared()))
    resumed, other = state_with(now, seed=1)
    resumed.load_file(TensorFile(saved))
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)
        assert one.requires_grad == same.requires_grad
    averages = state.extra["average"].state_dict(), resumed.extra["average"].state_dict()
    for one, same in zip(*(average.values() for average in averages), strict=True):
        assert torch.equal(one, same)
    weights = resumed.model_state()
    versions = named_as(state.model_state(), weights)._metadata
    assert versions.items() <= weights._metadata.items()
    assert {"version": 2} in versions.values()  # that of batch norm


def test_an_extra_object_that_does_not_load_its_state_is_one_line():
    parts = {"extra_state": nn.Linear(2, 2)}
    saved = state_of(nn.Linear(1, 1), lambda m: torch.optim.SGD(m.parameters()), **parts).shared()
    saved["extra"]["extra_state"] = nn.Linear(3, 3).state_dict()
    state = state_of(nn.Linear(1, 1), lambda m: torch.optim.SGD(m.parameters()), **parts)
    with pytest.raises(UserError, match=r"extra_state 'extra_state' cannot load .* size mismatch"):
        state.load_shared(saved)


def test_throughput_is_of_the_steps_that_were_timed(monkeypatch):
    """After a resume or a loss, those since the last reading are not: their time is not known."""
    progress = Progress(9)
    run = SimpleNamespace(
        state=SimpleNamespace(progress=progress),
        sinks=(),
        config=SimpleNamespace(log_interval=0.0),
    )
    clock = SimpleNamespace(take=lambda wait: StepTimes())
    engine = SimpleNamespace(step=SimpleNamespace(clock=clock))
    world = SimpleNamespace(size=1, device=torch.device("cpu"), comm=None)
    monkeypatch.setattr(observers, "sleeping_barrier", lambda comm: None)
    monkeypatch.setattr(
        observers, "gather_values", lambda comm, rank_values: [(rank_values[0], 0.5)]
    )
    metrics = observers.Metrics(run, SimpleNamespace(world=world, engine=engine), None, {})
    assert (progress.samples_per_sec, progress.step_time_sec) == (None, None)
    for number, samples, is_timed in ((1, 30, False), (2, 8, True), (3, 4, True)):
        progress.step_done(samples)
        if is_timed:
            metrics.step_done(
                Step(number, 0, samples, [samples], torch.ones(()), samples, True, StepTimes(), 0),
                None,
            )
    assert progress.step == 3
    assert (progress.samples_per_sec, progress.step_time_sec) == (12.0, 0.5)


def test_a_checkpoint_from_before_steps_were_counted_as_timed_is_resumed():
    state, other = make_state(), make_state(seed=1)
    train(state)
    state.progress.training_sec = 2.0
    content = state.shared()
    del content["progress"]["timed_steps"], content["progress"]["timed_samples"]
    other.load_shared(content)
    assert other.progress.samples_per_sec == pytest.approx(12.0)
    assert other.progress.step_time_sec == pytest.approx(2 / 3)
