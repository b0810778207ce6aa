"""Finds the fastest split of a global batch over heterogeneous ranks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kaitian_mpi.balance.cost_model import CostModel

_MAX_BISECTIONS = 100  # more than a double has bits, so that the search ends at adjacent numbers


@dataclass(frozen=True)
class RankCost:
    """The cost of a rank's share: b samples in k micro-batches take alpha*k + beta*b seconds."""

    model: CostModel
    largest_micro_batch: int | None = None
    """The most samples that fit in the rank's memory at once, at least 1; None: no limit."""

    def micro_batches(self, samples: int) -> int:
        """Return the number of micro-batches of a share."""
        if samples == 0:
            return 0
        limit = self.largest_micro_batch
        return 1 if limit is None else math.ceil(samples / limit)

    def seconds(self, samples: int) -> float:
        """Return the seconds of a step with this share; 0 without samples."""
        model = self.model
        return model.alpha_sec * self.micro_batches(samples) + model.beta_sec * samples

    def to_json(self) -> dict[str, Any]:
        """Convert to values that JSON can hold."""
        return asdict(self)

    @staticmethod
    def from_json(content: dict[str, Any]) -> RankCost:
        """Convert back from the result of `to_json`."""
        return RankCost(CostModel(**content["model"]), content["largest_micro_batch"])


def _check(cost: RankCost) -> None:
    """Raise ValueError for a cost for which the search for the fastest split would not end."""
    alpha, beta = cost.model.alpha_sec, cost.model.beta_sec
    if not 0 < beta < math.inf:  # false for NaN
        raise ValueError(f"beta_sec must be finite and above 0, not {beta}")
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha_sec must be finite and at least 0, not {alpha}")
    if cost.largest_micro_batch is not None and cost.largest_micro_batch < 1:
        raise ValueError(f"largest_micro_batch must be at least 1, not {cost.largest_micro_batch}")


def fastest_split(
    costs: Sequence[RankCost], global_batch_size: int, min_batch: int = 1
) -> list[int]:
    """Return the shares with the shortest step, i.e. those whose slowest rank finishes first.

    Minimizes max_i (alpha_i * k_i + beta_i * b_i) over integers b_i that sum to the global batch,
    each 0 or at least `min_batch`, with k_i = ceil(b_i / limit_i). A rank whose smallest share
    would slow down the step gets none. The same input gives the same shares on every machine.

    The step time is found by bisection: in a given time each rank can process some number of
    samples, and the shortest time in which they add up to the global batch is the optimum. At most
    `global_batch_size // min_batch` ranks can have a share, so those that can process the most get
    one. The surplus over the global batch is then removed from the rank that finishes last, one
    sample at a time.

    Args:
        costs: of each rank; every sample takes some time.
        global_batch_size: samples per step, 0 or at least `min_batch`.
        min_batch: the fewest samples that a rank can train on, at least 1.

    Returns:
        Samples per step, per rank.

    Raises:
        ValueError: a rank's cost is not finite, its time per sample is 0 (so that no share would
            be optimal), or the global batch is smaller than `min_batch`.
    """
    for cost in costs:
        _check(cost)
    if 0 < global_batch_size < min_batch:
        raise ValueError(f"global_batch_size must be 0 or at least {min_batch}")
    alpha, beta, limit = _as_arrays(costs, global_batch_size)
    max_ranks = min(len(costs), global_batch_size // min_batch)

    def samples_in(seconds: float) -> np.ndarray:
        samples = samples_within(seconds, alpha, beta, limit, global_batch_size)
        return samples if min_batch == 1 else np.where(samples >= min_batch, samples, 0)

    def capacity(seconds: float) -> np.ndarray:
        samples = samples_in(seconds)
        if min_batch == 1 or max_ranks == len(costs):
            return samples
        return np.partition(samples, -max_ranks)[-max_ranks:] if max_ranks else samples

    alone = min(cost.seconds(global_batch_size) for cost in costs)
    shares = samples_in(shortest_time(capacity, global_batch_size, alone))
    if min_batch > 1:
        shares[np.argsort(-shares, kind="stable")[max_ranks:]] = 0
    return remove_surplus(shares.tolist(), costs, global_batch_size, min_batch)


def _as_arrays(costs: Sequence[RankCost], most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each rank's alpha, beta, and largest micro-batch of shares up to `most`."""
    most = max(most, 1)
    limits = (cost.largest_micro_batch for cost in costs)
    return (
        np.array([cost.model.alpha_sec for cost in costs]),
        np.array([cost.model.beta_sec for cost in costs]),
        np.array([most if limit is None else min(limit, most) for limit in limits]),
    )


def samples_within(
    seconds: float, alpha: np.ndarray, beta: np.ndarray, limit: np.ndarray, most: int
) -> np.ndarray:
    """Return how many samples each rank can process in this time, at most `most`."""
    full_sec = alpha + beta * limit  # of a full micro-batch
    full_count = np.minimum(np.floor(seconds / full_sec), most)  # of at least a sample each
    left_sec = seconds - full_count * full_sec
    partial = np.clip(np.floor((left_sec - alpha) / beta), 0, limit)
    return np.minimum(full_count * limit + partial, most).astype(np.int64)


def shortest_time(capacity: Callable[[float], np.ndarray], enough: int, longest: float) -> float:
    """Return the shortest time, at most `longest`, in which the ranks process enough samples."""
    low, high = 0.0, longest * (1 + 1e-9)  # rounding must not make the known answer too short
    for _ in range(_MAX_BISECTIONS):
        middle = (low + high) / 2
        if not low < middle < high:  # they are adjacent
            break
        if capacity(middle).sum() >= enough:
            high = middle
        else:
            low = middle
    return high


def remove_surplus(
    shares: list[int],
    costs: Sequence[RankCost],
    total: int,
    min_batch: int = 1,
    may_idle: bool = True,
) -> list[int]:
    """Reduce shares until they sum to a total, always from the rank that finishes last.

    Args:
        shares: of each rank, 0 or at least `min_batch`; changed in place. With the smallest share
            for each rank that has one, the sum must not exceed the total.
        costs: of each rank.
        total: the required sum.
        min_batch: the smallest share.
        may_idle: whether a share may become 0.
    """
    surplus = sum(shares) - total
    if surplus == 0:
        return shares
    # The heap's first entry is the rank that finishes last; of several, the highest rank.
    by_finish = [
        (-cost.seconds(b), -i) for i, (cost, b) in enumerate(zip(costs, shares, strict=True))
    ]
    heapq.heapify(by_finish)
    while surplus:
        rank = -by_finish[0][1]
        removed = 1 if shares[rank] > min_batch else shares[rank]
        if removed == 0 or removed > surplus or (shares[rank] <= min_batch and not may_idle):
            heapq.heappop(by_finish)
            continue
        shares[rank] -= removed
        surplus -= removed
        heapq.heapreplace(by_finish, (-costs[rank].seconds(shares[rank]), -rank))
    return shares
