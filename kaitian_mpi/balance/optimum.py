"""The fastest split of a global batch over unlike ranks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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

    def to_json(self) -> dict[str, Any]:
        """Return it as values that JSON can hold."""
        return asdict(self)

    @staticmethod
    def from_json(content: dict[str, Any]) -> RankCost:
        """Return what `to_json` was made from."""
        return RankCost(CostModel(**content["model"]), content["largest_micro_batch"])


def _check(cost: RankCost) -> None:
    """Raise ValueError for a cost with which no search for the fastest split would end."""
    alpha, beta = cost.model.alpha_sec, cost.model.beta_sec
    if not 0 < beta < math.inf:  # false for NaN
        raise ValueError(f"beta_sec: found {beta}, needed more than 0, and finite")
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha_sec: found {alpha}, needed at least 0, and finite")
    if cost.largest_micro_batch is not None and cost.largest_micro_batch < 1:
        raise ValueError(f"largest_micro_batch: found {cost.largest_micro_batch}, needed 1 or more")


def fastest_split(
    costs: Sequence[RankCost], global_batch_size: int, min_batch: int = 1
) -> list[int]:
    """Return the shares that end the slowest rank's step first.

    Minimises max_i (alpha_i * k_i + beta_i * b_i) over whole b_i that sum to the global batch, each
    0 or at least `min_batch`, with k_i = ceil(b_i / limit_i). A rank that would slow the step down
    by its smallest share gets none. The same input gives the same shares on every machine.

    The step's time is found by bisection: within it each rank can do so many samples, and the
    least time in which all do enough is the optimum. No more ranks than there are smallest shares
    in the global batch can have one, so those that can do most count. Of what they could do beyond
    the global batch, the last to end is taken away first.

    Args:
        costs: of each rank; every sample takes some time.
        global_batch_size: samples of a step, 0 or at least `min_batch`.
        min_batch: the fewest samples that a rank can train on, at least 1.

    Returns:
        Samples per step of each rank.

    Raises:
        ValueError: a rank's cost is not finite, or it is said to do samples in no time, so that no
            share is right for it, or
            the whole global batch is smaller than the smallest share.
    """
    for cost in costs:
        _check(cost)
    if 0 < global_batch_size < min_batch:
        raise ValueError(f"found {global_batch_size} samples, needed 0 or at least {min_batch}")
    alpha = np.array([cost.model.alpha_sec for cost in costs])
    beta = np.array([cost.model.beta_sec for cost in costs])
    whole = max(global_batch_size, 1)
    limits = (cost.largest_micro_batch for cost in costs)
    limit = np.array([whole if most is None else min(most, whole) for most in limits])
    most_ranks = min(len(costs), global_batch_size // min_batch)

    def able(seconds: float) -> np.ndarray:
        samples = samples_within(seconds, alpha, beta, limit, global_batch_size)
        return samples if min_batch == 1 else np.where(samples >= min_batch, samples, 0)

    def capacity(seconds: float) -> np.ndarray:
        samples = able(seconds)
        if min_batch == 1 or most_ranks == len(costs):
            return samples
        return np.partition(samples, -most_ranks)[-most_ranks:] if most_ranks else samples

    alone = min(cost.seconds(global_batch_size) for cost in costs)
    shares = able(least_time(capacity, global_batch_size, alone))
    if min_batch > 1:
        shares[np.argsort(-shares, kind="stable")[most_ranks:]] = 0
    return without_surplus(shares.tolist(), costs, global_batch_size, min_batch)


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


def without_surplus(
    shares: list[int],
    costs: Sequence[RankCost],
    total: int,
    min_batch: int = 1,
    may_idle: bool = True,
) -> list[int]:
    """Take away what shares sum to beyond a total, always from the rank that ends last.

    Args:
        shares: of each rank, 0 or at least `min_batch`; changed in place. So many ranks have one
            that even with the smallest shares they do not exceed the total.
        costs: of each rank.
        total: the sum to come to.
        min_batch: the smallest share.
        may_idle: whether a share may become 0.
    """
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
        fewer = 1 if shares[rank] > min_batch else shares[rank]
        if fewer == 0 or fewer > surplus or (shares[rank] <= min_batch and not may_idle):
            heapq.heappop(last_to_end)
            continue
        shares[rank] -= fewer
        surplus -= fewer
        heapq.heapreplace(last_to_end, (-costs[rank].seconds(shares[rank]), -rank))
    return shares
