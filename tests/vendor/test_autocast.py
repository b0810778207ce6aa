"""Autocast on the emulated device casts as on a GPU; other tests of it rely on this."""

from collections.abc import Callable

import pytest
import torch
from fake_device import on_device, values
from torch import bfloat16, float16, float32, float64, nn
from torch.nn.functional import bilinear, layer_norm
from worlds import mostly_in_one_kind

pytestmark = [pytest.mark.sizes(2), pytest.mark.usefixtures("world"), mostly_in_one_kind]


def autocast(dtype: torch.dtype = bfloat16) -> torch.autocast:
    return torch.autocast("fake", dtype)


def ones(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return on_device(torch.ones(shape or (2, 2), dtype=dtype))


def dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.dot(left[0], right[0])


def product_of_list(*matrices: torch.Tensor) -> torch.Tensor:
    return torch.linalg.multi_dot(matrices)


def sum_of_products(*matrices: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ij,jk->ik", matrices)


def with_bias(inputs: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return bilinear(inputs, inputs, inputs.new_ones(2, 2, 2), bias[0])


def put(tensor: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    indices = on_device(torch.tensor([0, 1]))
    return torch.ops.aten.index_put(tensor, [None, indices], content)


def in_given_dtype(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.softmax(0, dtype=tensor.dtype)


@pytest.mark.parametrize(
    ("operation", "given", "expected"),
    [
        (torch.mm, (float32, bfloat16), bfloat16),
        (torch.mm, (float64, float64), float64),
        (product_of_list, (float32, bfloat16, float32), bfloat16),
        (sum_of_products, (bfloat16, float32), bfloat16),
        (torch.exp, (bfloat16,), float32),
        (torch.exp, (float64,), float64),
        (torch.pow, (bfloat16, float32), float32),
        (lambda tensor: layer_norm(tensor, (2,), tensor[0]), (bfloat16,), float32),
        (lambda tensor: tensor.softmax(0), (bfloat16,), float32),
        (in_given_dtype, (bfloat16,), bfloat16),
        (torch.sum, (bfloat16,), float32),
        (torch.sum, (float64,), float64),
        (torch.sum, (torch.int32,), torch.int64),
        (lambda tensor: tensor.sum(0), (bfloat16,), float32),
        (lambda tensor: torch.ops.aten.norm.Scalar(tensor, 2), (bfloat16,), float32),
        (lambda tensor: torch.ops.aten.norm.Scalar(tensor, 2), (float64,), float64),
        (lambda tensor: torch.ops.aten.norm(tensor, 2, [0], True), (bfloat16,), float32),
        (dot, (bfloat16, bfloat16), bfloat16),
        (dot, (bfloat16, float32), float32),
        (put, (bfloat16, float32), float32),
        # Optional tensors are cast as well, but are not asked for their type.
        (with_bias, (bfloat16, float32), bfloat16),
        (torch.add, (bfloat16, bfloat16), bfloat16),
    ],
)
def test_operations_run_in_the_type_of_their_policy(
    operation: Callable[..., torch.Tensor],
    given: tuple[torch.dtype, ...],
    expected: torch.dtype,
):
    tensors = [ones(dtype) for dtype in given]
    with autocast():
        result = operation(*tensors)
    assert result.dtype is expected
    on_host = operation(*(tensor.to(expected) for tensor in tensors))
    torch.testing.assert_close(values(result), values(on_host), rtol=1e-2, atol=1e-2)


def test_promotion_rejects_another_low_precision():
    with autocast(), pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        dot(ones(bfloat16), ones(float16))


def test_a_weight_is_cast_once():
    """`cached_cast` keeps the copies of leaves until autocast ends, and gradients reach these."""
    weight = nn.Parameter(ones(float32))
    with autocast(float16):
        first, second = (torch.mm(ones(float32), weight) for _ in range(2))
        of_list = torch.linalg.multi_dot([ones(float32), ones(float32), weight])
    copies = {result.grad_fn.next_functions[1][0] for result in (first, second)}
    assert len(copies) == 1
    (first.sum() + second.sum() + of_list.sum()).backward()
    assert weight.grad is not None
    assert values(weight.grad).tolist() == [[8.0, 8.0]] * 2
