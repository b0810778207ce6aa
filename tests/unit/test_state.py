"""The training state: what is saved, what is restored, and what is rolled back."""

import collections
import copy
import json
from dataclasses import asdict
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.image_classification import make_optimizer
from kaitian_mpi.train.loop import apply_step, set_learning_rates
from kaitian_mpi.train.progress import Progress, count_steps
from kaitian_mpi.train.state import State
from kaitian_mpi.train.state_transfer import from_bytes, to_bytes
from kaitian_mpi.train.task import Computation, Task


class Buffered(nn.Module):
    """Weights, batch norm and buffers of several types."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("short", torch.zeros(2, 3, dtype=torch.bfloat16))
        self.register_buffer("whole", torch.zeros(5, dtype=torch.int64))
        self.register_buffer("switch", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("fine", torch.zeros((), dtype=torch.float64))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)
        self.register_buffer("turns", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("fine_turns", torch.zeros(2, dtype=torch.complex128))

    def forward(self, x):
        return self.norm(self.linear(x))


def make_state(model=None, seed=0, precision="fp32"):
    torch.manual_seed(seed)
    model = Buffered() if model is None else model
    computation = Computation(torch.device("cpu"), precision, "contiguous")
    task = Task(model=model, data=[0], optimizer=partial(make_optimizer, TrainConfig(lr=0.1)))
    return State(task, computation, total_steps=20)


def train(state, steps=3):
    for _ in range(steps):
        state.model(torch.randn(8, 4)).square().sum().backward()
        state.optimizers[0].step()
        state.zero_gradients()
        state.progress.step_done(8)


def fill_buffers(model):
    model.short.copy_(torch.tensor([[0.1, -3.0, 1e30], [1e-30, 7.0, float("inf")]]))
    model.whole.copy_(torch.tensor([0, -1, 2**53 + 1, 2**62 + 12345, -(2**63) + 1]))
    model.switch.copy_(torch.tensor([True, False]))
    model.fine.fill_(1 / 3)
    model.unsaved.copy_(torch.tensor([1.5, -2.5]))
    model.turns.copy_(torch.tensor([1 - 2j, 0.5j]))
    model.fine_turns.copy_(torch.tensor([1 / 3 - 1j, 1j / 3], dtype=torch.complex128))


def parameters(state):
    return [value.detach().clone() for value in state.model.parameters()]


def buffers(state):
    return [value.detach().clone() for value in state.model.buffers()]


def equal(some, others):
    return all(
        one.dtype == other.dtype and torch.equal(one, other)
        for one, other in zip(some, others, strict=True)
    )


def test_shared_state_round_trip_with_momentum():
    state, other = make_state(), make_state(seed=1)
    train(state)
    state.progress.epoch, state.progress.bad_steps = 2, 1
    assert not equal(parameters(state), parameters(other))
    other.load_shared(from_bytes(to_bytes(state.shared())))
    assert equal(parameters(state), parameters(other))
    assert other.is_begun
    assert other.progress == state.progress
    kept, loaded = (list(s.optimizers[0].state.values()) for s in (state, other))
    assert len(kept) == 4
    for one, another in zip(kept, loaded, strict=True):
        assert torch.equal(one["momentum_buffer"], another["momentum_buffer"])
        assert one["momentum_buffer"].any()
    inputs = torch.Generator().manual_seed(5)
    for each in (state, other):
        torch.manual_seed(inputs.initial_seed())
        train(each)
    assert equal(parameters(state), parameters(other))


def test_the_total_number_of_steps_is_not_restored():
    state, other = make_state(), make_state()
    other.progress.total_steps = 99
    other.load_shared(state.shared())
    assert other.progress.total_steps == 99


def test_the_optimizers_hyperparameters_are_not_restored():
    state, other = make_state(), make_state()
    train(state)
    for group in state.optimizers[0].param_groups:
        group |= {"lr": 7.0, "momentum": 0.1, "nesterov": False, "weight_decay": 0.3}
    before = [dict(group, params=None) for group in other.optimizers[0].param_groups]
    other.load_shared(from_bytes(to_bytes(state.shared())))
    assert [dict(group, params=None) for group in other.optimizers[0].param_groups] == before
    assert len(other.optimizers[0].state) == 4, "the momentum is the checkpoint's"


def test_the_state_of_another_model_is_rejected():
    with pytest.raises(UserError, match="the checkpoint is of another model"):
        make_state(nn.Linear(4, 2)).load_shared(make_state().shared())


def test_per_rank_state_is_restored_bit_by_bit():
    state, other = make_state(), make_state(seed=1)
    train(state)
    fill_buffers(state.model)
    own = from_bytes(to_bytes(state.rank_state()))
    expected = torch.rand(5)
    torch.manual_seed(77)
    other.load_rank_state(own)
    assert equal(buffers(state), buffers(other))
    assert torch.equal(torch.rand(5), expected)
    assert not equal(parameters(state), parameters(other))


def test_an_interrupted_transaction_is_rolled_back():
    state = make_state()
    train(state)
    fill_buffers(state.model)
    weights, before = parameters(state), buffers(state)
    for _ in range(2):
        state.save()
        state.model(torch.randn(8, 4)).sum().backward()
        state.model.whole.add_(1)
        state.model.short.zero_()
        state.model.switch.logical_not_()
        assert not equal(before, buffers(state))
        state.restore()
        assert equal(before, buffers(state))
        assert equal(weights, parameters(state))
        assert all(parameter.grad is None for parameter in state.model.parameters())


def test_a_committed_transaction_is_not_rolled_back():
    state = make_state()
    before = buffers(state)
    state.restore()  # no transaction has begun
    assert equal(before, buffers(state))
    state.save()
    train(state, 1)
    state.commit()
    after = buffers(state)
    state.restore()
    assert equal(after, buffers(state))
    assert not equal(before, after)


def test_new_ranks_get_the_statistics_of_all_samples():
    shares = [5, 1, 10]
    samples = torch.randn(sum(shares), 3, dtype=torch.float64) * 3 + 7
    state = make_state()
    own = []
    for rank, part in enumerate(samples.split(shares)):
        norm = state.model.norm
        norm.running_mean.copy_(part.mean(0))
        norm.running_var.copy_(part.var(0, correction=0))
        state.model.whole.fill_(rank)
        own.append(from_bytes(to_bytes(state.rank_state())))
    other = make_state(seed=1)
    other.load_pooled_statistics(own, shares)
    torch.testing.assert_close(other.model.norm.running_mean.double(), samples.mean(0))
    torch.testing.assert_close(
        other.model.norm.running_var.double(), samples.var(0, correction=0), rtol=1e-5, atol=1e-4
    )
    assert other.model.whole.tolist() == [0] * 5, "what cannot be pooled is the first rank's"


@pytest.mark.parametrize(
    ("done", "flags", "batch", "steps"),
    [
        ({}, {"epochs": 4}, 25, 16),
        ({}, {"epochs": 4}, 30, 16),
        ({}, {"epochs": 4, "max_steps": 7}, 30, 7),
        ({}, {"epochs": 4, "max_steps": 70}, 30, 16),
        # half of the second epoch was done in steps of 10; what is left is in steps of 25
        ({"step": 15, "epoch": 1, "position": 50}, {"epochs": 4}, 25, 15 + 2 + 8),
        ({"step": 15, "epoch": 1, "position": 50}, {"epochs": 4, "max_steps": 16}, 25, 16),
        ({"step": 15, "epoch": 1, "position": 50}, {"epochs": 4, "max_steps": 5}, 25, 15),
        ({"step": 15, "epoch": 1, "position": 50}, {"epochs": 1}, 25, 15),
        ({"step": 10, "epoch": 0, "position": 100}, {"epochs": 1}, 25, 10),
        ({"step": 40, "epoch": 4}, {"epochs": 4}, 25, 40),
        ({"step": 40, "epoch": 4}, {"epochs": 6}, 25, 48),
    ],
)
def test_total_steps_are_done_plus_remaining(done, flags, batch, steps):
    assert count_steps(TrainConfig(**flags), 100, batch, 1, Progress(0, **done)) == steps


def test_the_schedule_counts_samples_whatever_the_global_batch():
    config = TrainConfig(epochs=4)
    for batch in (10, 20, 50):
        progress, done = Progress(0), []
        while progress.samples < 400:
            done.append(progress.fraction_done(config, batch, 100))
            progress.step_done(batch)
        assert done == [batch * (n + 0.5) / 400 for n in range(400 // batch)]
    progress = Progress(0, step=15, epoch=1, position=50, samples=150)
    assert progress.fraction_done(config, 50, 100) == 175 / 400
    assert progress.fraction_done(TrainConfig(epochs=4, max_steps=20), 50, 100) == 15.5 / 20
    assert progress.fraction_done(TrainConfig(epochs=1), 50, 100) == 1.0


STEPS = 12


class Counter:
    """Extra state of any value."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def scheduled(make_scheduler, total_steps=STEPS, lr=0.1, weight_decay=0.0, extra=None):
    """Return a state with a scheduler."""
    task = Task(
        model=nn.Linear(2, 1),
        data=[0],
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=lr, weight_decay=weight_decay),
        scheduler=make_scheduler,
        extra_state=extra,
    )
    computation = Computation(torch.device("cpu"), "fp32", "contiguous")
    return State(task, computation, total_steps)


def rates(state, steps):
    """Train, and return the learning rate of each step."""
    found = []
    for _ in range(steps):
        set_learning_rates(TrainConfig(), state, 1, 1)
        found.append(state.progress.learning_rate)
        state.model(torch.randn(8, 2)).square().sum().backward()
        apply_step(state._schedules._task, state, True, 8)
    return found


def resumed(state, *arguments, **settings):
    """Return another job's state, after it has loaded this one."""
    other = scheduled(*arguments, **settings)
    other.check_restorable()
    other.load_shared(from_bytes(to_bytes(state.shared())))
    return other


def one_cycle(optimizer, steps):
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)


def cosine_of_a_closure(optimizer, steps):
    return lr_scheduler.LambdaLR(optimizer, lambda k: 0.5 * (1 + numpy.cos(numpy.pi * k / steps)))


def two_in_sequence(optimizer, steps):
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        lr_scheduler.CosineAnnealingLR(optimizer, steps - 3),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


SCHEDULERS = [
    *(lr_scheduler.CosineAnnealingLR, one_cycle, cosine_of_a_closure, two_in_sequence),
    lambda optimizer, steps: [
        lr_scheduler.ExponentialLR(optimizer, 0.9),
        lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps),
    ],
]


@pytest.mark.parametrize("make_scheduler", SCHEDULERS)
def test_a_finished_run_with_more_steps_continues_the_schedule_of_all_of_them(make_scheduler):
    expected = rates(scheduled(make_scheduler, 2 * STEPS), 2 * STEPS)
    state = scheduled(make_scheduler)
    rates(state, STEPS)
    other = resumed(state, make_scheduler, total_steps=2 * STEPS)
    assert rates(other, STEPS) == pytest.approx(expected[STEPS:])


@pytest.mark.parametrize("make_scheduler", SCHEDULERS)
def test_an_interrupted_run_continues_its_schedule_bit_by_bit(make_scheduler):
    expected = rates(scheduled(make_scheduler), STEPS)
    state = scheduled(make_scheduler)
    rates(state, 5)
    made = []

    def noted(optimizer, steps):
        made.append(steps)
        return make_scheduler(optimizer, steps)

    assert rates(resumed(state, noted), STEPS - 5) == expected[5:]
    assert made == [STEPS], "nothing has changed, so the scheduler's own state is loaded"


def test_settings_of_a_resumed_job_apply_under_a_scheduler_with_a_state():
    def halved(optimizer):
        return lr_scheduler.StepLR(optimizer, 2, 0.5)

    expected = rates(scheduled(halved, lr=0.4), 9)
    state = scheduled(halved, lr=0.1)
    rates(state, 5)
    other = resumed(state, halved, lr=0.4, weight_decay=0.3)
    assert rates(other, 4) == pytest.approx(expected[5:])
    assert other.optimizers[0].param_groups[0]["weight_decay"] == 0.3


def test_schedulers_follow_a_change_of_the_number_of_steps_while_training():
    expected = rates(scheduled(one_cycle, 20), 20)
    state = scheduled(one_cycle)
    rates(state, 5)
    state.progress.bad_steps += 1  # a step that was skipped has moved no scheduler
    state.progress.step += 1
    state.set_total_steps(20)
    assert rates(state, 15) == pytest.approx(expected[5:])


def test_a_scheduler_that_cannot_follow_is_one_line():
    state = scheduled(one_cycle)
    rates(state, 8)
    with pytest.raises(UserError, match="cannot continue at step 8 of 12"):
        resumed(state, lambda optimizer, steps: one_cycle(optimizer, steps - 5))


@pytest.mark.parametrize("lr", [torch.tensor(0.1), numpy.float32(0.1), numpy.float64(0.1)])
@pytest.mark.parametrize("make_scheduler", [None, lambda o: lr_scheduler.StepLR(o, 2, 0.5)])
def test_a_learning_rate_may_be_a_tensor_or_a_number_of_numpys(lr, make_scheduler):
    def copied():
        return copy.deepcopy(lr)

    expected = rates(scheduled(make_scheduler, lr=copied()), 6)
    assert [type(rate) for rate in expected] == [float] * 6
    state = scheduled(make_scheduler, lr=copied())
    rates(state, 3)
    json.dumps(asdict(state.progress))
    assert rates(resumed(state, make_scheduler, lr=copied()), 3) == pytest.approx(expected[3:])


@pytest.mark.parametrize(
    ("value", "saved"),
    [
        (numpy.float64(0.5), 0.5),
        ({numpy.int64(1): [numpy.bool_(True)]}, {1: [True]}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (torch.Size([1, 2]), (1, 2)),
    ],
)
def test_numbers_of_numpy_and_other_containers_are_saved_as_plain_values(value, saved):
    state = scheduled(None, extra=Counter(value))
    state.check_restorable()
    found = from_bytes(to_bytes(state.shared()))["extra"]["extra_state"]["value"]
    assert (type(found), found) == (type(saved), saved)


@pytest.mark.parametrize("value", [{1, 2}, [object()], numpy.zeros(2)])
def test_extra_state_that_checkpoints_cannot_hold_is_found_before_training(value):
    with pytest.raises(UserError, match=r"Task: extra_state\['extra_state'\]\['value'\].* is a"):
        scheduled(None, extra=Counter(value)).check_restorable()
