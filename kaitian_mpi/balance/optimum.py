"""The fastest split of a global batch over unlike ranks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kaitian_mpi.balance.cost_model import CostModel

_HALVINGS = 100  # more than a double has bits, so that the search ends at neighbouring numbers


@dataclass(frozen=True)
class RankCost:
    """What a rank needs for its share: b samples in k micro-batches take alpha*k + beta*b."""

    model: CostModel
    largest_micro_batch: int | None = None
    """Samples that fit the rank's memory at once, at least 1; None: any number."""

    def micro_batches(self, samples: int) -> int:
        """Return how many micro-batches a share is cut into."""
        if samples == 0:
            return 0
        limit = self.largest_micro_batch
        return 1 if limit is None else math.ceil(samples / limit)

    def seconds(self, samples: int) -> float:
        """Return the seconds of a step with this share; none for no sample."""
        model = self.model
        return model.alpha_sec * self.micro_batches(samples) + model.beta_sec * samples


def fastest_split(costs: Sequence[RankCost], global_batch_size: int) -> list[int]:
    """Return the shares that end the slowest rank's step first.

    Minimises max_i (alpha_i * k_i + beta_i * b_i) over whole b_i >= 0 that sum to the global batch,
    with k_i = ceil(b_i / limit_i). A rank that would slow the step down by a single sample gets
    none. The same input gives the same shares on every machine.

    The step's time is found by bisection: within it each rank can do so many samples, and the
    least time in which all do enough is the optimum. Of what they could do beyond the global batch,
    the last to end is taken away first.

    Args:
        costs: of each rank; every sample takes some time.
        global_batch_size: samples of a step, at least 0.

    Returns:
        Samples per step of each rank.

    Raises:
        ValueError: a rank is said to do samples in no time, so that no share is right for it.
    """
    for cost in costs:
        if cost.model.beta_sec <= 0:
            raise ValueError(f"beta_sec: found {cost.model.beta_sec}, needed more than 0")
    alpha = np.array([cost.model.alpha_sec for cost in costs])
    beta = np.array([cost.model.beta_sec for cost in costs])
    whole = max(global_batch_size, 1)
    limits = (cost.largest_micro_batch for cost in costs)
    limit = np.array([whole if most is None else min(most, whole) for most in limits])

    def capacity(seconds: float) -> np.ndarray:
        return samples_within(seconds, alpha, beta, limit, global_batch_size)

    alone = min(cost.seconds(global_batch_size) for cost in costs)
    shares = capacity(least_time(capacity, global_batch_size, alone))
    return _without_surplus(shares.tolist(), costs, global_batch_size)


def samples_within(
    seconds: float, alpha: np.ndarray, beta: np.ndarray, limit: np.ndarray, most: int
) -> np.ndarray:
    """Return how many samples each rank can do in this time, `most` at most."""
    full = alpha + beta * limit  # seconds of a full micro-batch
    full_ones = np.minimum(np.floor(seconds / full), most)  # of at least a sample each
    rest = seconds - full_ones * full
    partial = np.clip(np.floor((rest - alpha) / beta), 0, limit)
    return np.minimum(full_ones * limit + partial, most).astype(np.int64)


def least_time(capacity: Callable[[float], np.ndarray], enough: int, longest: float) -> float:
    """Return the least time in which the ranks can do enough samples."""
    low, high = 0.0, longest * (1 + 1e-9)  # rounding must not make the known answer too short
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if capacity(middle).sum() >= enough:
            high = middle
        else:
            low = middle
    return high


def _without_surplus(shares: list[int], costs: Sequence[RankCost], total: int) -> list[int]:
    surplus = sum(shares) - total
    if surplus == 0:
        return shares
    # The heap's first is the rank that ends last, of several the highest.
    last_to_end = [
        (-cost.seconds(b), -i) for i, (cost, b) in enumerate(zip(costs, shares, strict=True))
    ]
    heapq.heapify(last_to_end)
    while surplus:
        rank = -last_to_end[0][1]
        shares[rank] -= 1
        surplus -= 1
        heapq.heapreplace(last_to_end, (-costs[rank].seconds(shares[rank]), -rank))
    return shares
