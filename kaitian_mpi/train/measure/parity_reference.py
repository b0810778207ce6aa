"""The reference that the kinds of devices are compared with before training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.computation import Computation
from kaitian_mpi.train.gradient_probe import Gradients, Noise, compute_gradients
from kaitian_mpi.train.measure.parity_tolerance import Tolerance, tolerance_of
from kaitian_mpi.train.task import Task

# On the host it must be cheap beside the training.
_MAX_HOST_PARAMETERS = 50_000_000
_MAX_HOST_FORWARD_SEC = 0.5


@dataclass(frozen=True)
class Reference:
    """What the kinds are compared with."""

    gradients: Gradients
    tolerances: dict[float, Tolerance]
    """By unit roundoff."""
    text: str
    """Where and how it was computed."""


def make_reference(
    task: Task, batch: Any, own: Computation, seed: int, units: Sequence[float], world: World
) -> Reference:
    """Compute the reference: on the host in float64, then float32, then as this rank trains.

    The host comes first because it depends on no kind's kernels and so shows which kind is wrong;
    but a large model takes too long there, and a model's code may be for one device or dtype only.

    Args:
        task: its model and loss.
        batch: on the host.
        own: how this rank computes.
        seed: of random numbers.
        units: the unit roundoffs of the results that are to be compared with it.
        world: this rank's.
    """
    # Contiguous, as any model takes it and convolutions in float64 are faster so.
    host = Computation(torch.device("cpu"), "fp32", "contiguous")
    ways: list[tuple[Computation, torch.dtype | None]] = [(own, None)]
    if _is_cheap_on_host(task, batch, host, seed):
        ways = [(host, None), *ways]
        if not any(parameter.is_complex() for parameter in task.model.parameters()):
            ways = [(host, torch.float64), *ways]
    for way in ways:
        try:
            return _compute(task, batch, *way, seed, units, world)
        except Exception:  # of user code that is for one device or dtype
            if way[0] is own:
                raise
    raise AssertionError("the last way returns or raises")


def _compute(
    task: Task,
    batch: Any,
    computation: Computation,
    dtype: torch.dtype | None,
    seed: int,
    units: Sequence[float],
    world: World,
) -> Reference:
    """Compute the reference in one way, and what random changes do to it."""
    found = compute_gradients(task, batch, computation, seed, dtype=dtype)
    tolerances = {}
    for unit in units:
        noise = Noise(unit, seed)
        changed = compute_gradients(task, batch, computation, seed, dtype=dtype, noise=noise)
        tolerances[unit] = tolerance_of(found, changed, unit)
    how = "in float64 on its host" if dtype else f"in {computation.precision}"
    return Reference(found, tolerances, f"{world.info} {how}")


def _is_cheap_on_host(task: Task, batch: Any, host: Computation, seed: int) -> bool:
    """Return whether the host computes the batch without delaying the start by much."""
    if sum(parameter.numel() for parameter in task.model.parameters()) > _MAX_HOST_PARAMETERS:
        return False
    began = time.perf_counter()
    try:
        with torch.no_grad():
            compute_gradients(task, batch, host, seed, dtype=torch.float32)
    except Exception:  # user code that runs on its device only may raise anything
        return False
    return time.perf_counter() - began < _MAX_HOST_FORWARD_SEC
