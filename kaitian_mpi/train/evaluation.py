"""Evaluation, distributed over all ranks; each sample is counted once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from kaitian_mpi.balance.shares import apportion
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.data.batches import Batches
from kaitian_mpi.train.task import Task, check_loss

MAX_BATCH = 64
_MAX_READ_SEC = 0.1


@torch.no_grad()
def evaluate(task: Task, world: World, results: Iterable[tuple[Any, Any, int]]) -> dict[str, float]:
    """Return the means of the metrics over all samples, by name. Collective.

    They are the same on every rank. `results` computes this rank's batches: what the task's metrics
    or loss has returned for each, the batch on the host, and the number of its samples.
    """
    modes = [(module, module.training) for module in task.model.modules()]
    task.model.eval()
    totals: dict[str, list[float]] = {}
    try:
        for result, batch, samples in results:
            for name, (value, count) in _measure(task, result, batch, samples).items():
                total = totals.setdefault(name, [0.0, 0.0])
                total[0] += value
                total[1] += count
    finally:  # after the loss of a rank, another evaluation follows
        task.model.train(modes[0][1])
        for module, was_training in modes:  # some may be kept from training, such as batch norm
            module.training = was_training
    # The slowest rank is waited for, however long that takes.
    enter_phase("the sum of the evaluation", waits=True, limited=False)
    return pool_means(gather_values(world.comm, totals))


def evaluation_indices(
    length: int, rank: int, shares: Sequence[float], batch: int
) -> list[list[int]]:
    """Return this rank's batches of an evaluation over `length` samples.

    Over all ranks each sample is used exactly once, in order, in proportion to their shares.
    """
    counts = apportion(length, shares)
    start = sum(counts[:rank])
    stop = start + counts[rank]
    return [list(range(first, min(first + batch, stop))) for first in range(start, stop, batch)]


def _measure(task: Task, result: Any, batch: Any, samples: int) -> dict[str, tuple[float, float]]:
    """Return (sum, count) of each metric, given what the task's metrics or loss has returned."""
    if task.metrics is None:
        loss = check_loss(result, needs_gradient=False).item()
        weight = task.weight_of(batch, samples)
        return {"loss": (loss * weight if weight else 0.0, weight)}
    if not isinstance(result, Mapping):
        raise UserError(
            f"Task: metrics returned a {type(result).__name__}; it must return a dict of sums, or "
            "of pairs (sum, count), by name"
        )
    measured = {}
    for name, value in result.items():
        pair = value if isinstance(value, tuple) and len(value) == 2 else (value, samples)
        try:
            measured[str(name)] = float(pair[0]), float(pair[1])
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"Task: metrics returned {name}={value!r}; it must be a sum over the batch, or a "
                "pair (sum, count), of numbers or tensors of one element"
            ) from error
    return measured


def pool_means(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the means of all ranks' sums; in float64, and in the ranks' order everywhere."""
    names = list(dict.fromkeys(name for totals in by_rank for name in totals))
    means = {}
    for name in names:
        # The builtin sum rounds differently from Python 3.12 on, and ranks must agree.
        total = count = 0.0
        for totals in by_rank:
            of_rank = totals.get(name, (0.0, 0.0))
            total, count = total + of_rank[0], count + of_rank[1]
        means[name] = total / count if count else float("nan")
    return means


class Reader:
    """Loads batches in pieces that take a moment each, however slow a dataset is.

    Each is a phase to the watchdog, so that only a sample that hangs is taken for a hang.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._samples = 1  # per piece

    def read(self, indices: list[int]) -> Any:
        if not isinstance(self._data, Batches):  # batches in memory
            enter_phase("loading samples to evaluate")
            return self._data[indices]
        samples: list[Any] = []
        while left := indices[len(samples) :]:
            enter_phase("loading samples to evaluate")
            began = time.perf_counter()
            samples += self._data.samples(left[: self._samples])
            is_fast = time.perf_counter() - began < _MAX_READ_SEC
            self._samples = 2 * self._samples if is_fast else max(1, self._samples // 2)
        return self._data.collate(samples)
