"""A step or an evaluation that does not come about is done again, and leaves no trace.

What refuses here is the commit: it raises on every rank, as it does after a loss, and a new loop
goes on from the same state.
"""

import copy
import itertools
import math

import pytest
import torch
from samples import BATCH, LENGTH, Points
from test_trainer import (
    by_step,
    make_setup,
    make_state,
    note_samples,
    reverse,
    steps_of,
    uneven,
)
from torch import nn

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.train.data.loader import ShareLoader
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.measure.plan import Plan
from kaitian_mpi.train.progress import count_steps

pytestmark = pytest.mark.sizes(3)

EPOCHS = 2
STEPS = math.ceil(LENGTH / BATCH)
COMMITS = STEPS + 1  # of an epoch: its steps, and the evaluation


class RefusedError(CollectiveError):
    """The error that a refused commit raises here."""


class Commit:
    """A commit that fails at some calls, counted from 0."""

    def __init__(self, refused=()):
        self.refused, self.calls = refused, 0

    def __call__(self, succeeded):
        assert succeeded
        call, self.calls = self.calls, self.calls + 1
        if call in self.refused:
            raise RefusedError("planted")


def make_model(with_norm):
    torch.manual_seed(3)
    # Over four numbers of a sample, so that even a single sample has statistics.
    norms = [nn.Unflatten(1, (4, 4)), nn.BatchNorm1d(4), nn.Flatten()] if with_norm else []
    layers = nn.Linear(3, 16), *norms, nn.Tanh(), nn.Linear(16, 4)
    return nn.Sequential(*layers).double()


class Run:
    """A run of two epochs, by as many loops as needed."""

    def __init__(self, world, commit=None, with_norm=False, workers=0, micro_batch_size=None):
        self.world, self.commit = world, commit
        self.micro_batch_size = micro_batch_size
        self.config = TrainConfig(
            global_batch_size=BATCH, epochs=EPOCHS, workers=workers, log_interval=60, lr=0.1
        )
        model = make_model(with_norm)
        self.setup = make_setup(self.config, model, Points())
        self.state = make_state(world, self.setup, count_steps(self.config, LENGTH, BATCH))
        self.loader = ShareLoader(self.setup.train, workers, pin_memory=False)
        self.taken = []
        """This rank's samples in each completed step."""
        self.results = []
        self.refusals = 0

    def train(self, shares, other_shares=None):
        while not self.state.progress.is_done:
            loop = self._make_loop(shares)
            try:
                while not self.state.progress.is_done:
                    for _ in steps_of(loop):
                        pass
                    self.results.append(loop.evaluate())
                    self.state.progress.epoch_done(EPOCHS)
            except RefusedError:
                self.refusals += 1
                shares = other_shares or shares
            finally:
                loop.close()
        self.loader.close()
        return self

    def _make_loop(self, shares):
        plan = Plan(
            shares,
            [1.0] * self.world.size,
            None,
            "contiguous",
            "fp32",
            micro_batch_size=self.micro_batch_size,
        )
        own = self.setup, self.state, plan, self.loader, self.commit
        loop = Loop(self.config, self.world, *own)
        note_samples(loop, self.taken)
        return loop

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.state.model.parameters()])

    def buffers(self):
        return [buffer.clone() for buffer in self.state.model.buffers()]

    def momenta(self):
        of_parameters = self.state.optimizers[0].state.values()
        return torch.cat([value["momentum_buffer"].flatten() for value in of_parameters])


def assert_each_sample_once(world, run):
    steps = by_step(world, run.taken)
    assert len(steps) == EPOCHS * STEPS
    for epoch in range(EPOCHS):
        of_epoch = steps[epoch * STEPS : (epoch + 1) * STEPS]
        assert sorted(itertools.chain(*of_epoch)) == list(range(LENGTH))


def assert_same(run, other):
    assert (run.weights() - other.weights()).abs().max() < 1e-12
    assert (run.momenta() - other.momenta()).abs().max() < 1e-12
    for one, another in zip(run.buffers(), other.buffers(), strict=True):
        assert (one - another).abs().max() < 1e-12
    ours, theirs = (copy.copy(vars(r.state.progress)) for r in (run, other))
    del ours["training_sec"], theirs["training_sec"]
    assert ours == theirs
    assert [r["accuracy"] for r in run.results] == [r["accuracy"] for r in other.results]
    for one, another in zip(run.results, other.results, strict=True):
        assert one["loss"] == pytest.approx(another["loss"], abs=1e-12)


PLACES = {
    "the first step": [0],
    "in mid-epoch": [3],
    "the same step twice": [3, 4],
    "the last, partial step": [STEPS - 1],
    "the evaluation": [STEPS],
    "the second epoch's first step": [COMMITS],
    "the last evaluation": [2 * COMMITS - 1],
    "several": [1, 5, STEPS + 2, COMMITS + 5],
}


@pytest.mark.parametrize("refused", PLACES.values(), ids=PLACES)
def test_a_refused_step_is_repeated_without_a_trace(world, refused):
    undisturbed = Run(world, with_norm=True).train(uneven(world))
    run = Run(world, Commit(refused), with_norm=True).train(uneven(world))
    assert run.refusals == len(refused)
    assert_each_sample_once(world, run)
    assert by_step(world, run.taken) == by_step(world, undisturbed.taken)
    assert_same(run, undisturbed)


@pytest.mark.parametrize("workers", [0, 1])
def test_recovery_is_exact_with_micro_batches_and_workers(world, workers):
    undisturbed = Run(world, with_norm=True, micro_batch_size=5).train(uneven(world))
    commit = Commit([2, COMMITS + 3])
    run = Run(world, commit, with_norm=True, workers=workers, micro_batch_size=5)
    run.train(uneven(world))
    assert run.refusals == 2
    assert_each_sample_once(world, run)
    assert_same(run, undisturbed)


@pytest.mark.parametrize("workers", [0, 1])
def test_recovery_with_another_split_gives_the_same_weights(world, workers):
    undisturbed = Run(world).train(uneven(world))
    run = Run(world, Commit([4]), workers=workers).train(uneven(world), reverse(world))
    assert run.refusals == 1
    assert_each_sample_once(world, run)
    assert by_step(world, run.taken) == by_step(world, undisturbed.taken)
    assert_same(run, undisturbed)
    if world.size > 1:
        sizes = [len(indices) for indices in run.taken]
        assert sizes[3] == uneven(world)[world.rank]
        assert sizes[4] == reverse(world)[world.rank]


def test_a_commit_that_always_succeeds_changes_nothing(world):
    commit = Commit()
    run = Run(world, commit, with_norm=True).train(uneven(world))
    assert commit.calls == EPOCHS * COMMITS
    assert_same(run, Run(world, with_norm=True).train(uneven(world)))
