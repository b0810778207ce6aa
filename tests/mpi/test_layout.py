"""A layout of a user's own: a class of its own, an engine, and an entry in the table of layouts."""

import pytest
import torch
import torch.distributed as dist
from samples import BATCH, EPOCHS, IN_BOTH_FORMS, QUIET, STEPS, change_shares, points, squares
from torch import nn
from torch.optim import SGD

from kaitian_mpi import Task, Training
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler
from kaitian_mpi.train.engine import Engine, Summed, apply_step
from kaitian_mpi.train.layouts import LAYOUTS
from kaitian_mpi.train.layouts.replicate import ReplicateLayout

pytestmark = pytest.mark.sizes(1, 3)


class OwnGradients:
    """Leaves the gradients to each rank."""

    carries_number = False
    is_outdated = False

    def arm(self, weight, number=None):
        pass

    finish = check_values = reset = close = lambda self: None


class AveragingEngine(Engine):
    """Each rank steps with its own gradient; then the weights are averaged by the samples.

    With plain SGD, that is a step with the mean gradient.
    """

    applied = 0

    def _make_gradients(self):
        return OwnGradients()

    def finish(self):
        return Summed(is_finite=True, mean_loss=self.step.mean_loss())

    def apply(self, is_finite):
        AveragingEngine.applied += 1
        state, own = self._state, self.step.own_samples / self.step.samples
        if not own:  # what it has computed is of no sample
            state.zero_gradients()
        apply_step(self._task, state, is_finite, self.step.samples)
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.mul_(own)
                dist.all_reduce(parameter)


class AveragingLayout(ReplicateLayout):
    name = "shard"  # of those that a config accepts
    engine = AveragingEngine


def layers():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


@IN_BOTH_FORMS
def test_a_layout_is_added_without_a_change_to_the_package(world, monkeypatch, is_open):
    monkeypatch.setitem(LAYOUTS, "shard", lambda config, setup, world: AveragingLayout())
    model = layers()
    task = Task(
        model=model,
        optimizer=SGD(model.parameters(), lr=0.05),
        data=points(),
        loss=None if is_open else squares,
    )
    steps = AveragingEngine.applied = 0
    with Training(task, layout="shard", **QUIET) as training:
        for batch in training.batches() if is_open else training:
            if is_open:
                training.backward(squares(training.model, batch))
                assert training.step()
            steps += 1
            change_shares(training, world, steps)
    assert steps == AveragingEngine.applied == EPOCHS * STEPS
    alone = layers()
    optimizer = SGD(alone.parameters(), lr=0.05)
    for epoch in range(EPOCHS):
        sampler = LoadAdaptiveSampler(points(), [BATCH], 0)
        sampler.set_epoch(epoch)
        for indices in sampler:
            squares(alone, points()[indices]).backward()
            optimizer.step()
            optimizer.zero_grad()
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(own, other, rtol=0, atol=1e-12)
