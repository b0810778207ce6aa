"""What one process makes of the batches that ranks train on, and comparisons with it."""

import copy

import pytest
import torch
from torch import nn

from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler


def order_of(samples, batch, epochs):
    """Return the samples of each step."""
    sampler, steps = LoadAdaptiveSampler(range(samples), [batch], 0), []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for begin in range(0, samples, batch):
            steps.append(sampler.indices(begin, min(batch, samples - begin)))
    return steps


def alone(world, task, batches):
    """Train on whole batches in one process, rank 0. Collective.

    Return the model, with its weights on all ranks, and rank 0's optimizers and losses.
    """
    model, losses = copy.deepcopy(task.model), []
    optimizers = task.make_optimizers(model)
    schedulers = task.make_schedulers(optimizers, len(batches))
    for batch in batches if world.rank == 0 else []:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        losses.append(loss.item())
        if task.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        for each in (*optimizers, *schedulers):
            each.step()
    sleeping_barrier(world.comm)
    for value in model.state_dict().values():
        world.comm.Bcast(value.numpy(), root=0)
    return model, optimizers, losses


def compare(own, other, tolerance=1e-12):
    """Compare nested states."""
    if isinstance(other, torch.Tensor):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)
    elif isinstance(other, dict):
        assert own.keys() == other.keys()
        for name in other:
            compare(own[name], other[name], tolerance)
    elif isinstance(other, list):
        assert len(own) == len(other)
        for pair in zip(own, other, strict=True):
            compare(*pair, tolerance)
    else:
        assert own == pytest.approx(other)
