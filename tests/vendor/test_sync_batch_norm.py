"""Batch norm over all ranks, some of which have an accelerator, equals that of one process."""

import copy

import pytest
import torch
from fake_device import DeviceTensor, values
from test_vendor import agree
from torch import nn

import kaitian_mpi

pytestmark = pytest.mark.sizes(2, 3)

SPLITS = {2: [[5, 4], [0, 9], [8, 1]], 3: [[3, 2, 4], [0, 8, 1], [9, 0, 0]]}


def network():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Tanh(), nn.BatchNorm2d(4))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model.double()


def test_any_split_over_both_kinds_equals_one_process(world):
    alone = network()
    model = kaitian_mpi.convert_sync_batchnorm(copy.deepcopy(alone)).to(world.device)
    wrapped = kaitian_mpi.data_parallel(model, broadcast_buffers=False)
    for split in SPLITS[world.size]:
        batch = torch.randn(9, 3, 4, 3).double() + 30  # a mean that would cost E[x^2] digits
        own = batch.split(split)[world.rank].to(world.device)
        model.zero_grad()
        alone.zero_grad()
        for output in (alone(batch), wrapped(own)):
            each = output.pow(3).flatten(1).sum(1)
            (each.mean() if len(each) else each.sum()).backward()
        # Of the whole gradient: that of a bias before a batch norm is zero but for rounding.
        scale = max(theirs.grad.abs().max().item() for theirs in alone.parameters())
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert (values(ours.grad) - theirs.grad).abs().max() <= 1e-12 * scale
            assert agree(world, ours.grad)
        for ours, theirs in zip(model.buffers(), alone.buffers(), strict=True):
            assert isinstance(ours, DeviceTensor) == (world.info.kind != "cpu")
            assert (values(ours) - theirs).abs().max() <= 1e-12 * theirs.abs().max()
