"""A correct device agrees with the reference, and a wrong one does not."""

from dataclasses import replace

import pytest
import torch

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.recipes.image_classification import make_task
from kaitian_mpi.train.computation import Computation
from kaitian_mpi.train.data.batches import as_batches
from kaitian_mpi.train.measure.outcome import compute_outcome, rounding_unit
from kaitian_mpi.train.measure.tolerance import differences, distances, tolerances

CPU = torch.device("cpu")
HOST = Computation(CPU, "fp32", "contiguous")


@pytest.fixture(scope="module")
def known():
    """A model's task, a batch, and the reference."""
    task = make_task(TrainConfig(model="cnn", seed=3))
    data = as_batches(task.data, task.collate)
    batch = data[[index * len(task.data) // 4 for index in range(4)]]
    return task, batch, compute_outcome(task, batch, HOST, 3, torch.float64)


@pytest.fixture(scope="module", params=["fp32", "bf16", "fp16"])
def judged(known, request):
    """Return a correct outcome, and a function that judges a changed one."""
    task, batch, reference = known
    computation = Computation(CPU, request.param, "channels_last")
    unit = rounding_unit(task.model, computation)
    changed = compute_outcome(task, batch, HOST, 3, torch.float64, unit)
    allowed = tolerances(distances(changed, reference, unit), reference, unit)
    own = compute_outcome(task, batch, computation, 3)
    return own, lambda outcome: differences(outcome, reference, unit, allowed)[0]


def scaled(tensors, factor, part=1.0):
    """Multiply the first part of some tensors."""
    count = max(1, round(part * len(tensors)))
    return {n: t * (factor if i < count else 1) for i, (n, t) in enumerate(tensors.items())}


FAULTS = {
    "no gradient": lambda own: replace(own, gradients=scaled(own.gradients, 0.0)),
    "a gradient that is not a number": lambda own: replace(
        own, gradients=scaled(own.gradients, float("nan"), 0.01)
    ),
    "the opposite gradient": lambda own: replace(own, gradients=scaled(own.gradients, -1.0)),
    "twice the gradient": lambda own: replace(own, gradients=scaled(own.gradients, 2.0)),
    "buffers that do not change": lambda own: replace(own, buffers=scaled(own.buffers, 0.0)),
    "twice the loss": lambda own: replace(own, loss=2 * own.loss),
    "other outputs": lambda own: replace(own, outputs=own.outputs.flip(0)),
    "no loss": lambda own: replace(own, loss=float("nan")),
}


def test_a_correct_device_agrees(judged):
    own, judge = judged
    assert judge(own).excess < 0.7


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_wrong_device_does_not(judged, fault):
    own, judge = judged
    assert judge(fault(own)).excess > 1
