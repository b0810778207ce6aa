"""Ranks that diverge and which are correct, and devices that compute something else."""

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from choices import by_default
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.recipes.datasets import load_data
from kaitian_mpi.recipes.image_classification import classify, make_optimizer
from kaitian_mpi.recipes.models import build_model
from kaitian_mpi.train import divergence
from kaitian_mpi.train.data.batches import as_batches
from kaitian_mpi.train.divergence import (
    by_frequency,
    differs_by_rounding,
    rounding_unit,
    without_outliers,
)
from kaitian_mpi.train.measure.parity import compute_outcome, distances, tolerances
from kaitian_mpi.train.state import State
from kaitian_mpi.train.task import Computation, Task


def test_the_majority_is_asked_first_and_only_hosts_in_float32_are_judged_strictly():
    for ranks, agree, expected in (
        (["a1", "a1", "b2"], [1, 1, 1], [0, 1, 2]),
        (["a1", "a1", "b2"], [1, 1, 0], [0, 1]),
        (["a1", "b2", "b3"], [1, 1, 1], [0, 1]),  # by one bit among equals
        (["a1", "b2", "b3"], [1, 0, 1], [0, 2]),  # by more
        (["a1", "b2", "b3", "b3"], [1, 1, 1, 1], [0, 2, 3]),
        (["a1", "b1"], [1, 1], [0, 1]),
    ):
        checksums = [((rounding,), int(checksum)) for rounding, checksum in ranks]
        assert without_outliers(checksums, agree) == expected
    assert by_frequency([5]) == [0]
    assert by_frequency([7, 5, 5]) == [1, 0]
    assert by_frequency([5, 7, 7, 5]) == [0, 1]
    assert by_frequency([1, 7, 2, 7, 3]) == [1, 0, 2, 4]
    for precision, is_host, unit in (("fp32", True, 2**-20), ("fp32", False, 2**-11)):
        assert rounding_unit(nn.Linear(1, 1), precision, is_host) == unit
    assert rounding_unit(nn.Linear(1, 1), "bf16", True) == 2**-8
    assert rounding_unit(nn.Linear(1, 1).bfloat16(), "fp32", False) == 2**-8


def make_state(dtype=torch.float32):
    """A model after one step, so that the optimizer has momentum."""
    torch.manual_seed(1)
    layers = nn.Linear(11, 11), nn.Linear(11, 11), nn.Linear(11, 3)
    model = nn.Sequential(*layers).to(dtype)
    task = Task(model=model, data=[0], optimizer=partial(make_optimizer, TrainConfig()))
    state = State(task, Computation(torch.device("cpu"), "fp32", "contiguous"), 10)
    model(torch.randn(5, 11, dtype=dtype)).square().sum().backward()
    state.optimizers[0].step()
    state.zero_gradients()
    return state


def checksum(state):
    return divergence.checksum_of(state.replicas())


WHOLE = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}


def flip(tensor, index, bit):
    bits = tensor.detach().view(WHOLE[tensor.dtype]).view(-1)
    mask = torch.tensor(1, dtype=torch.int64) << bit
    bits[index] ^= mask.to(bits.dtype)


@pytest.mark.parametrize(
    "dtype",
    by_default([torch.float32, torch.float64, torch.bfloat16], [torch.bfloat16]),
)
def test_any_flipped_bit_and_another_order_change_the_checksum(dtype):
    state, before = make_state(dtype), checksum(make_state(dtype))
    state.load_shared(copy.deepcopy(state.shared()))
    assert checksum(state) == before
    seen = {before}
    states = state.optimizers[0].state.values()
    momenta = [parameter_state["momentum_buffer"] for parameter_state in states]
    assert len(momenta) == 6
    for tensor in (*state.model.parameters(), *momenta):
        for index in (0, tensor.numel() - 1):
            for bit in range(8 * dtype.itemsize):
                flip(tensor, index, bit)
                flipped = checksum(state)
                assert flipped != before, (index, bit)
                seen.add(flipped)
                flip(tensor, index, bit)
    assert len(seen) > 200
    first, second = (state.model[layer].weight.detach().view(-1) for layer in (0, 1))
    first[[0, 1]] = first[[1, 0]]
    assert checksum(state) != before
    first[[0, 1]] = first[[1, 0]]
    assert checksum(state) == before
    copied = first.clone()
    first.copy_(second)
    second.copy_(copied)
    assert checksum(state) != before


def random_tensor(dtype=torch.float32):
    random = torch.Generator().manual_seed(2)
    return (torch.randn(40, 50, generator=random, dtype=torch.float64) * 0.05).to(dtype)


def rounded_differently(tensor, steps):
    """Return a tensor whose last bits have made a random walk of so many steps."""
    random = torch.Generator().manual_seed(1)
    units = torch.randint(-1, 2, (steps, *tensor.shape), generator=random).sum(0)
    change = tensor.double() * units * torch.finfo(tensor.dtype).eps
    return (tensor.double() + change).to(tensor.dtype)


def test_differences_by_rounding_are_accepted():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        tensor = random_tensor(dtype)
        for steps in (1, 200):
            other = rounded_differently(tensor, steps)
            assert not torch.equal(tensor, other)
            assert differs_by_rounding(tensor, other, steps)
            assert differs_by_rounding(tensor, tensor, 0)
    assert differs_by_rounding(torch.zeros(9), torch.full((9,), 1e-40), 0)  # flushed to zero
    odd = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    assert differs_by_rounding(odd, odd + torch.tensor([1e-6, 0, 0, 0]), 200)
    for index in range(4):
        other = odd.clone()
        other[index] = 5.0
        assert not differs_by_rounding(odd, other, 200)
        assert not differs_by_rounding(other, odd, 200)
    turned = torch.view_as_complex(rounded_differently(random_tensor(), 9).view(-1, 2))
    assert differs_by_rounding(torch.view_as_complex(random_tensor().view(-1, 2)), turned, 9)


def element(tensor):
    tensor[3, 4] += 0.01


def row(tensor):
    tensor[7] = tensor[8]


def skipped_steps(tensor):
    tensor += 1e-4 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(
    "change", [element, row, skipped_steps, lambda t: t.mul_(1.001), torch.Tensor.zero_]
)
def test_other_differences_are_refused(change):
    tensor = random_tensor()
    changed = random_tensor()
    change(changed)
    assert not differs_by_rounding(changed, tensor, 200)
    assert not differs_by_rounding(tensor, changed, 200)
    assert not differs_by_rounding(torch.ones(2), torch.ones(3), 200)
    assert not differs_by_rounding(torch.ones(2), torch.ones(2).double(), 200)
    assert not differs_by_rounding(torch.tensor(1000), torch.tensor(1001), 200)


CPU = torch.device("cpu")
HOST = Computation(CPU, "fp32", "contiguous")
REFERENCE = Computation(CPU, "float64", "contiguous")


@pytest.fixture(scope="module")
def task_batch_reference():
    """A model's task, a batch, and the reference."""
    config = TrainConfig(model="cnn", seed=3)
    source = load_data(config)
    torch.manual_seed(3)
    task = classify(config, build_model("cnn", 10), source)
    data = as_batches(task.data, task.collate)
    batch = data[[index * len(task.data) // 4 for index in range(4)]]
    return task, batch, compute_outcome(task, batch, REFERENCE, 3)


@pytest.fixture(scope="module", params=["fp32", "bf16", "fp16"])
def outcome_and_excess(task_batch_reference, request):
    """Return a correct outcome, and a function that returns by how much one exceeds tolerances."""
    task, batch, reference = task_batch_reference
    computation = Computation(CPU, request.param, "channels_last")
    unit = rounding_unit(task.model, request.param, is_host=True)
    changed = compute_outcome(task, batch, REFERENCE, 3, unit)
    allowed = tolerances(distances(changed, reference, unit), unit)

    def excess(outcome):
        measured = distances(outcome, reference, unit)
        ratios = [distance / allowed[name] for name, distance in measured.items()]
        return max(99.0 if math.isnan(ratio) else ratio for ratio in ratios)

    return compute_outcome(task, batch, computation, 3), excess


def scaled(tensors, factor, part=1.0):
    """Multiply the first part of some tensors."""
    count = max(1, round(part * len(tensors)))
    return {n: t * (factor if i < count else 1) for i, (n, t) in enumerate(tensors.items())}


FAULTS = {
    "no gradient": lambda outcome: {"gradients": scaled(outcome.gradients, 0.0)},
    "no number": lambda outcome: {"gradients": scaled(outcome.gradients, float("nan"), 0.01)},
    "the opposite gradient": lambda outcome: {"gradients": scaled(outcome.gradients, -1.0)},
    "twice the gradient": lambda outcome: {"gradients": scaled(outcome.gradients, 2.0)},
    "buffers that do not change": lambda outcome: {"buffers": 0 * outcome.buffers},
    "twice the loss": lambda outcome: {"loss": 2 * outcome.loss},
    "no loss": lambda outcome: {"loss": float("nan")},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_correct_device_agrees_and_a_wrong_one_does_not(outcome_and_excess, fault):
    outcome, excess = outcome_and_excess
    assert excess(outcome) < 0.7
    assert excess(replace(outcome, **fault(outcome))) > 1


class ComputedAgain(nn.Sequential):
    """Keeps none of its results for backward, as with activation checkpointing."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


ATTENTION = functional.scaled_dot_product_attention
LAYERS = {
    "dropout": nn.Dropout(0.5),
    "a function": lambda x: functional.dropout(x, 0.5, True),
    "by keyword": lambda x: functional.alpha_dropout(input=x, p=0.5, training=True),
    "attention": lambda x: ATTENTION(x, x, x, None, 0.5, True),
    "attention by keyword": lambda x: ATTENTION(x, x, x, dropout_p=0.5),
    "a transformer": nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5),
    "computed again": ComputedAgain(nn.Dropout(0.5), nn.Tanh()),
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
    first = outcome(seed=1, noise=0)
    second = outcome(seed=2, noise=0)
    assert first.loss == second.loss
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, second.gradients[name]), name
    assert not first.is_random
    assert outcome(seed=1, noise=1).is_random
