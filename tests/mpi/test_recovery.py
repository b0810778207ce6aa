"""A step or an evaluation that does not come about is done again, and leaves no trace.

What refuses here is the commit: it raises on every rank, as it does after a loss, and a new loop
goes on from the same state.
"""

import copy

import pytest
import torch
from loops import EPOCHS, STEPS, RefusedError, Run, reverse, uneven
from torch import nn

pytestmark = pytest.mark.sizes(3)

COMMITS = STEPS + 1  # of an epoch: its steps, and the evaluation


class Commit:
    """A commit that fails at some calls, counted from 0."""

    def __init__(self, refused=()):
        self.refused, self.calls = refused, 0

    def __call__(self, succeeded):
        assert succeeded
        call, self.calls = self.calls, self.calls + 1
        if call in self.refused:
            raise RefusedError("planted")


def with_norm(world, commit=None, **settings):
    # Over four numbers of a sample, so that even a single sample has statistics.
    norm = nn.Unflatten(1, (4, 4)), nn.BatchNorm1d(4), nn.Flatten()
    return Run(world, uneven(world), layers=norm, commit=commit, **settings)


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
    ours, theirs = (copy.copy(vars(r.state.progress)) for r in (run, other))
    del ours["training_sec"], theirs["training_sec"]
    assert ours == theirs
    for one, another in zip(run.results, other.results, strict=True):
        assert one["accuracy"] == another["accuracy"]
        assert one["loss"] == pytest.approx(another["loss"], abs=1e-12)


PLACES = {
    "nowhere": [],
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
    commit = Commit(refused)
    run = with_norm(world, commit).train()
    assert run.refusals == len(refused)
    assert refused or commit.calls == EPOCHS * COMMITS
    assert_same(run, with_norm(world).train())


@pytest.mark.parametrize("workers", [0, 1])
def test_recovery_is_exact_with_micro_batches_workers_and_another_split(world, workers):
    commit = Commit([2, COMMITS + 3])
    run = with_norm(world, commit, micro_batch_size=5, workers=workers).train()
    assert run.refusals == 2
    assert_same(run, with_norm(world, micro_batch_size=5).train())
    run = Run(world, uneven(world), commit=Commit([4]), workers=workers)
    run.train(other_shares=reverse(world))
    assert run.refusals == 1
    assert_same(run, Run(world, uneven(world)).train())
    sizes = [len(indices) for indices in run.taken[3:5]]
    assert sizes == [uneven(world)[world.rank], reverse(world)[world.rank]]
