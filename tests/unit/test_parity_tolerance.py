"""A correct device agrees with the reference, and a wrong one does not."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.recipes.image_classification import make_task
from kaitian_mpi.train.data.batches import as_batches
from kaitian_mpi.train.measure.parity import compute_outcome, distances, rounding_unit, tolerances
from kaitian_mpi.train.task import Computation, Task

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
    unit = rounding_unit(task.model, request.param, is_host=True)
    changed = compute_outcome(task, batch, HOST, 3, torch.float64, unit)
    allowed = tolerances(distances(changed, reference, unit), unit)

    def excess(outcome):
        found = distances(outcome, reference, unit)
        return max(each / allowed[n] if each == each else 99.0 for n, each in found.items())

    return compute_outcome(task, batch, computation, 3), excess


def scaled(tensors, factor, part=1.0):
    """Multiply the first part of some tensors."""
    count = max(1, round(part * len(tensors)))
    return {n: t * (factor if i < count else 1) for i, (n, t) in enumerate(tensors.items())}


FAULTS = {
    "no gradient": lambda own: {"gradients": scaled(own.gradients, 0.0)},
    "no number": lambda own: {"gradients": scaled(own.gradients, float("nan"), 0.01)},
    "the opposite gradient": lambda own: {"gradients": scaled(own.gradients, -1.0)},
    "twice the gradient": lambda own: {"gradients": scaled(own.gradients, 2.0)},
    "buffers that do not change": lambda own: {"buffers": 0 * own.buffers},
    "twice the loss": lambda own: {"loss": 2 * own.loss},
    "no loss": lambda own: {"loss": float("nan")},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_correct_device_agrees_and_a_wrong_one_does_not(judged, fault):
    own, excess = judged
    assert excess(own) < 0.7
    assert excess(replace(own, **fault(own))) > 1


def test_only_hosts_in_float32_are_judged_strictly():
    for precision, is_host, unit in (("fp32", True, 2**-20), ("fp32", False, 2**-11)):
        assert rounding_unit(nn.Linear(1, 1), precision, is_host) == unit
    assert rounding_unit(nn.Linear(1, 1), "bf16", True) == 2**-8
    assert rounding_unit(nn.Linear(1, 1).bfloat16(), "fp32", False) == 2**-8


ATTENTION = functional.scaled_dot_product_attention
LAYERS = {
    "dropout": nn.Dropout(0.5),
    "a function": lambda x: functional.dropout(x, 0.5, True),
    "by keyword": lambda x: functional.alpha_dropout(input=x, p=0.5, training=True),
    "attention": lambda x: ATTENTION(x, x, x, None, 0.5, True),
    "attention by keyword": lambda x: ATTENTION(x, x, x, dropout_p=0.5),
    "a transformer": nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5),
    "an LSTM": nn.LSTM(6, 6, num_layers=2, dropout=0.5),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_no_dropout_is_applied_and_random_numbers_are_noticed(layer):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(6))
            self.layer = layer if isinstance(layer, nn.Module) else nn.Identity()

        def forward(self, x):
            out = (self.layer if isinstance(layer, nn.Module) else layer)(x @ self.weight)
            return out[0] if isinstance(out, tuple) else out

    def outcome(seed, noise):
        def loss(model, batch):
            return (model(batch) + (noise and noise * torch.rand(1))).square().mean()

        task = Task(model=Model(), optimizer=torch.optim.SGD, data=[1], loss=loss)
        return compute_outcome(task, x, HOST, seed)

    x = torch.randn(2, 3, 6)
    assert outcome(1, 0).loss == outcome(2, 0).loss
    assert outcome(1, 1) is None
