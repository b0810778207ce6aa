"""What is found out of gradients at the end of a step."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kaitian_mpi.distributed.gradients import finite_and_norm, values_of

KINDS = torch.float32, torch.float64, torch.bfloat16


class Reads(TorchDispatchMode):
    """Counts how often a number is read, for which the host waits for a device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_many_gradients_are_judged_by_reading_once():
    torch.manual_seed(3)
    gradients = [torch.randn(size, 3).to(kind) for size in range(9) for kind in KINDS]
    with Reads() as reads:
        is_finite, squared_norm = finite_and_norm(gradients)
    assert (is_finite, reads.count) == (True, 0)
    expected = sum(gradient.double().square().sum().item() for gradient in gradients)
    assert squared_norm == pytest.approx(expected, rel=1e-6)
    assert finite_and_norm([]) == finite_and_norm([torch.empty(0)]) == (True, 0.0)


@pytest.mark.parametrize(
    ("value", "is_finite"), [(math.nan, False), (math.inf, False), (3e38, True)]
)
def test_only_what_is_not_finite_counts_as_such(value, is_finite):
    """The sum of large numbers' squares is infinite, and they are not."""
    assert finite_and_norm([torch.ones(5), torch.full((4,), value)])[0] is is_finite


def test_numbers_of_several_dtypes_keep_their_digits():
    numbers = [torch.tensor(0.1), torch.tensor([0.1], dtype=torch.float64), torch.tensor(2.0)]
    assert values_of(numbers) == [float(number) for number in numbers]
