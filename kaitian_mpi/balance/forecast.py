"""Forecasts the throughput of a job from measured costs, without running it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kaitian_mpi.balance.communication import (
    AllreduceCost,
    MeasuredAllreduce,
    exposed_seconds,
    scale_allreduce,
)
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.fastest_split import CostTable, split_cohorts
from kaitian_mpi.errors import UserError

_MAX_KINDS_FOR_ALL_SUBSETS = 8


@dataclass(frozen=True)
class Cohort:
    """Ranks of one kind with the same cost."""

    kind: str
    cost: RankCost
    ranks: int = 1
    """The number of ranks, at least 1."""


@dataclass(frozen=True)
class Share:
    """The samples per step of each of some ranks of a cohort."""

    cohort: Cohort
    samples: int
    ranks: int

    @property
    def seconds(self) -> float:
        """Compute time of such a rank per step, in seconds."""
        return self.cohort.cost.seconds(self.samples)


@dataclass(frozen=True)
class Forecast:
    """The predicted performance of a job. Seconds are per step."""

    shares: tuple[Share, ...]
    """In the order of the cohorts, within a cohort the larger share first."""
    exposed_sec: float
    """Communication that is not hidden behind computing."""

    @property
    def batch_sizes(self) -> list[int]:
        """Samples per step of each rank, in the order of the cohorts."""
        return [share.samples for share in self.shares for _ in range(share.ranks)]

    @property
    def compute_sec(self) -> float:
        """Compute time of the slowest rank."""
        return max(share.seconds for share in self.shares)

    @property
    def step_sec(self) -> float:
        """Compute time plus exposed communication."""
        return self.compute_sec + self.exposed_sec

    @property
    def samples_per_sec(self) -> float:
        """Throughput of the whole job."""
        return sum(share.samples * share.ranks for share in self.shares) / self.step_sec

    @property
    def efficiency(self) -> float:
        """Throughput relative to the sum of what each rank reaches alone, in (0, 1].

        Alone means at its share and without communication; a rank without samples counts with its
        rate at one sample.
        """
        alone = math.fsum(
            share.ranks * max(share.samples, 1) / share.cohort.cost.seconds(max(share.samples, 1))
            for share in self.shares
        )
        return min(1.0, self.samples_per_sec / alone)  # rounding may exceed 1 slightly


@dataclass(frozen=True)
class SubsetForecasts:
    """Forecasts for subsets of a world's device kinds, at the same global batch size."""

    kinds: tuple[str, ...]
    """The kinds of the whole world."""
    forecasts: Mapping[tuple[str, ...], Forecast]
    """By the kinds that take part, in the order of `kinds`."""

    @property
    def whole(self) -> Forecast:
        """The forecast with every rank."""
        return self.forecasts[self.kinds]

    @property
    def best(self) -> tuple[str, ...]:
        """The fastest combination of kinds; of equally fast ones the smallest."""
        return max(
            self.forecasts, key=lambda kinds: (self.forecasts[kinds].samples_per_sec, -len(kinds))
        )

    def gain(self, kind: str) -> float | None:
        """Return a kind's gain: 0.3 for 30% more samples/s with it; None for the only kind."""
        rest = tuple(other for other in self.kinds if other != kind)
        if not rest:
            return None
        return self.whole.samples_per_sec / self.forecasts[rest].samples_per_sec - 1


def forecast(
    cohorts: Sequence[Cohort],
    global_batch_size: int,
    buckets: Sequence[int],
    allreduce: AllreduceCost,
) -> Forecast:
    """Forecast a job with the fastest split of its global batch. A rank may get no samples."""
    costs = CostTable.of([cohort.cost for cohort in cohorts])
    ranks = np.array([cohort.ranks for cohort in cohorts])
    columns = (column.tolist() for column in split_cohorts(costs, ranks, global_batch_size))
    shares = [
        Share(cohort, share, count)
        for cohort, samples, fewer in zip(cohorts, *columns, strict=True)
        for share, count in ((samples, cohort.ranks - fewer), (samples - 1, fewer))
        if count
    ]
    slowest = max(shares, key=lambda share: share.seconds)
    exposed_sec = exposed_seconds(
        slowest.seconds, buckets, allreduce, slowest.cohort.cost.micro_batches(slowest.samples)
    )
    return Forecast(tuple(shares), exposed_sec)


def forecast_subsets(
    cohorts: Sequence[Cohort],
    global_batch_size: int,
    buckets: Sequence[int],
    measured: Sequence[MeasuredAllreduce],
) -> SubsetForecasts:
    """Forecast the job for every subset of its device kinds."""
    kinds = tuple(ranks_per_kind(cohorts))
    forecasts = {}
    for subset in subsets(kinds):
        part = [cohort for cohort in cohorts if cohort.kind in subset]
        cost = scale_allreduce(measured, ranks_per_kind(part))
        forecasts[subset] = forecast(part, global_batch_size, buckets, cost)
    return SubsetForecasts(kinds, forecasts)


def ranks_per_kind(cohorts: Iterable[Cohort]) -> dict[str, int]:
    """Count the ranks of each kind."""
    counts: dict[str, int] = {}
    for cohort in cohorts:
        counts[cohort.kind] = counts.get(cohort.kind, 0) + cohort.ranks
    return counts


def scale_cohorts(measured: Sequence[Cohort], wanted: Mapping[str, int]) -> list[Cohort]:
    """Return the ranks of a larger world, which take the costs of the measured ranks in turn."""
    scaled = []
    for kind, ranks in wanted.items():
        models = [cohort for cohort in measured if cohort.kind == kind]
        if not models:
            raise UserError(
                f"kind {kind!r} was not measured, only {', '.join(ranks_per_kind(measured))}; "
                "correct the name, or measure again with such a device"
            )
        rounds, extra = divmod(ranks, len(models))
        counts = [rounds + (index < extra) for index in range(len(models))]
        scaled += [replace(m, ranks=n) for m, n in zip(models, counts, strict=True) if n]
    return scaled


def subsets(kinds: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return every subset of kinds; of more than 8, each alone, all, and all but one."""
    sizes: Iterable[int] = range(1, len(kinds) + 1)
    if len(kinds) > _MAX_KINDS_FOR_ALL_SUBSETS:
        sizes = (1, len(kinds) - 1, len(kinds))
    return [subset for size in sizes for subset in itertools.combinations(kinds, size)]
