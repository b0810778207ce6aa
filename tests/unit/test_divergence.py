"""Fingerprints that detect diverged ranks, and the choice of the correct ones."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.recipes.image_classification import make_optimizer
from kaitian_mpi.train import divergence
from kaitian_mpi.train.divergence import alike, by_frequency, differs_by_rounding
from kaitian_mpi.train.state import State
from kaitian_mpi.train.task import Computation, Task


def test_ranks_of_a_kind_that_agree_with_another_have_equal_bits():
    for own, agree, found in (
        (["a1", "a1", "b2"], [1, 1, 1], [0, 1, 2]),
        (["a1", "a1", "b2"], [1, 1, 0], [0, 1]),
        (["a1", "b2", "b3"], [1, 1, 1], [0, 1]),  # by one bit among equals
        (["a1", "b2", "b3"], [1, 0, 1], [0, 2]),  # by more
        (["a1", "b2", "b3", "b3"], [1, 1, 1, 1], [0, 2, 3]),
        (["a1", "b1"], [1, 1], [0, 1]),
    ):
        assert alike([((kind,), int(bits)) for kind, bits in own], agree) == found


def test_the_majority_is_asked_first_and_in_a_tie_the_lowest_rank():
    values = [5], [7, 5, 5], [5, 7, 7, 5], [1, 7, 2, 7, 3]
    assert [*map(by_frequency, values)] == [[0], [1, 0], [0, 1], [1, 0, 2, 4]]


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


def fingerprint(state):
    return divergence.fingerprint(state.replicas())


WHOLE = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}


def flip(tensor, index, bit):
    bits = tensor.detach().view(WHOLE[tensor.dtype]).view(-1)
    mask = torch.tensor(1, dtype=torch.int64) << bit
    bits[index] ^= mask.to(bits.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_flipped_bit_and_another_order_change_the_fingerprint(dtype):
    state, before = make_state(dtype), fingerprint(make_state(dtype))
    state.load_shared(copy.deepcopy(state.shared()))
    assert fingerprint(state) == before
    seen = {before}
    momenta = [of["momentum_buffer"] for of in state.optimizers[0].state.values()]
    assert len(momenta) == 6
    for tensor in (*state.model.parameters(), *momenta):
        for index in (0, tensor.numel() // 2, tensor.numel() - 1):
            for bit in range(8 * dtype.itemsize):
                flip(tensor, index, bit)
                found = fingerprint(state)
                assert found != before, (index, bit)
                seen.add(found)
                flip(tensor, index, bit)
    assert len(seen) > 200
    one, other = (state.model[layer].weight.detach().view(-1) for layer in (0, 1))
    one[[0, 1]] = one[[1, 0]]
    assert fingerprint(state) != before
    one[[0, 1]] = one[[1, 0]]
    assert fingerprint(state) == before
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
    assert fingerprint(state) != before


def random_tensor(dtype=torch.float32):
    made = torch.randn(40, 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (made * 0.05).to(dtype)


def rounded_differently(tensor, steps):
    """What a walk of the last bit at each step makes of a tensor."""
    random = torch.Generator().manual_seed(1)
    units = torch.randint(-1, 2, (steps, *tensor.shape), generator=random).sum(0)
    change = tensor.double() * units * torch.finfo(tensor.dtype).eps
    return (tensor.double() + change).to(tensor.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("steps", [1, 200])
def test_what_rounding_does_is_no_difference(dtype, steps):
    own = random_tensor(dtype)
    other = rounded_differently(own, steps)
    assert not torch.equal(own, other)
    assert differs_by_rounding(own, other, steps)
    assert differs_by_rounding(own, own, 0)


def test_numbers_that_are_almost_zero_and_that_are_none_may_be_rounded():
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
def test_what_rounding_does_not_do_is_a_difference(change):
    own, other = random_tensor(), random_tensor()
    change(own)
    assert not differs_by_rounding(own, other, 200)
    assert not differs_by_rounding(other, own, 200)
    for another in (torch.ones(3), torch.ones(2).double()):  # of another shape or type
        assert not differs_by_rounding(torch.ones(2), another, 200)
    assert not differs_by_rounding(torch.tensor(1000), torch.tensor(1001), 200)
