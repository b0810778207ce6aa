"""Changes of weights are noticed without a copy of them, however they are made."""

import pytest
import torch
from torch import nn

from kaitian_mpi.train.checkpoint.fingerprint import Fingerprint


def swap_data(parameter, other):
    parameter.data = other


def copy_data(parameter, other):
    parameter.data.copy_(other)


@torch.no_grad()
def copy_weights(parameter, other):
    parameter.copy_(other)


@torch.no_grad()
def add_nothing(parameter, other):
    parameter.add_(0)


@pytest.mark.parametrize("change", [swap_data, copy_data, copy_weights, add_nothing])
def test_a_change_of_weights_is_noticed(change):
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    mark = Fingerprint(model.parameters())
    assert mark.matches()
    weight = model[1].weight
    change(weight, weight.detach() + 1)
    assert not mark.matches()
    mark.take()
    assert mark.matches()
    change(weight, weight.detach() - 1)
    assert not mark.matches()


def test_tensors_of_any_kind_have_a_mark():
    types = torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64
    tensors = [torch.zeros(3, 6).to(kind)[:, :5] for kind in types]
    tensors += [torch.tensor(torch.nan), torch.zeros(4, 3).t(), torch.zeros(0)]
    tensors += [torch.zeros(2, 2).to_sparse(), torch.zeros(3, device="meta")]
    with torch.inference_mode():
        tensors.append(torch.zeros(3))
    mark = Fingerprint(tensors)
    assert mark.matches()
    for tensor in tensors[:7]:
        mark.take()
        tensor.data.fill_(1)
        assert not mark.matches()
    assert Fingerprint([]).matches()
