"""Batch norm over all ranks equals that of one process with all samples."""

import copy

import torch
from collective_cases import values
from torch import nn

import kaitian_mpi

SPLITS = {
    1: [[9]] * 4,
    2: [[5, 4], [0, 9], [8, 1], [9, 0]],
    3: [[3, 2, 4], [0, 8, 1], [9, 0, 0], [1, 1, 7]],
}


class Network(nn.Module):
    """Two batch norms, the first on plain channels; a mean of 30 would cost E[x^2] digits."""

    def __init__(self, norm, **options):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1.0, 2.0, 4))
        self.first, self.second = norm(4, **options), norm(4, **options)

    def forward(self, x):
        scale = self.scale.view(4, *[1] * (x.dim() - 2))
        hidden = torch.tanh(self.first(x * scale + 30))
        return self.second(hidden * scale).square().flatten(1).mean(1) + hidden.flatten(1).sum(1)


def shares_of(world, batches):
    """Return this rank's part of each batch of 9 samples."""
    splits = SPLITS[world.size][: len(batches)]
    parts = [batch.split(split) for batch, split in zip(batches, splits, strict=True)]
    return [part[world.rank].to(world.device) for part in parts]


def train_steps(model, batches):
    """Return the gradients of each step, and the buffers."""
    tensors = []
    for batch in batches:
        model.zero_grad()
        batch = batch.clone().requires_grad_()
        output = model(batch)
        loss = output.mean() if len(output) else output.sum()
        loss.backward()
        tensors += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return tensors + list(model.buffers())


def assert_close(ours, theirs, tolerance=1e-12):
    for tensor, other in zip(ours, theirs, strict=True):
        assert tensor.dtype == other.dtype
        scale = max(1.0, float(other.double().abs().max()))
        assert (values(tensor).double() - other.double()).abs().max() <= tolerance * scale


def check_any_split(world, norm=nn.BatchNorm2d, shape=(4, 3), tolerance=1e-12, **options):
    torch.manual_seed(1)
    alone = Network(norm, **options).double()
    ours = kaitian_mpi.convert_sync_batchnorm(copy.deepcopy(alone)).to(world.device)
    assert list(ours.state_dict()) == list(alone.state_dict())
    wrapped = kaitian_mpi.data_parallel(ours, broadcast_buffers=False)
    batches = [torch.randn(9, 4, *shape).double() for _ in SPLITS[world.size]]
    if norm is nn.BatchNorm2d:
        batches = [batch.contiguous(memory_format=torch.channels_last) for batch in batches]
    trained = train_steps(wrapped, shares_of(world, batches))
    assert_close(trained, train_steps(alone, batches), tolerance)
    ours.eval()
    alone.eval()
    with torch.no_grad():  # not collective
        assert_close([ours(batches[0].to(world.device))], [alone(batches[0])], tolerance)
