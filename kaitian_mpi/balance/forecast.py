"""Forecasts a job from measured costs, without running it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kaitian_mpi.balance.communication import (
    AllreduceCost,
    MeasuredAllreduce,
    exposed_seconds,
    scale_allreduce,
)
from kaitian_mpi.balance.cost_model import CostTable, RankCost
from kaitian_mpi.balance.fastest_split import split_cohorts
from kaitian_mpi.errors import UserError

MAX_SAMPLES = 10**9  # in a global batch
_MAX_KINDS_FOR_ALL_SUBSETS = 8


@dataclass(frozen=True)
class Cohort:
    """Ranks of one kind with the same cost."""

    kind: str
    cost: RankCost
    ranks: int = 1
    """The number of ranks, at least 1."""


@dataclass(frozen=True)
class CohortShare:
    """The number of samples per step that each of `ranks` ranks of a cohort takes."""

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

    shares: Sequence[CohortShare]
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
        rates_alone = []
        for share in self.shares:
            samples = max(share.samples, 1)
            rates_alone.append(share.ranks * samples / share.cohort.cost.seconds(samples))
        # Rounding may exceed 1 slightly.
        return min(1.0, self.samples_per_sec / math.fsum(rates_alone))


@dataclass(frozen=True)
class SubsetForecasts:
    """Forecasts for subsets of a world's device kinds, at the same global batch size."""

    world: Mapping[str, int]
    global_batch_size: int
    forecasts: Mapping[tuple[str, ...], Forecast]
    """By the participating kinds, in the order of `world`."""

    @property
    def whole(self) -> Forecast:
        """The forecast with every rank."""
        return self.forecasts[tuple(self.world)]

    @property
    def best(self) -> tuple[str, ...]:
        """The fastest combination of kinds; the smallest if several are equally fast."""
        rates = {kinds: job.samples_per_sec for kinds, job in self.forecasts.items()}
        return max(rates, key=lambda kinds: (rates[kinds], -len(kinds)))

    def gain(self, kind: str) -> float | None:
        """Return a kind's gain: 0.3 for 30% more samples/s with it; None for the only kind."""
        rest = self.forecasts.get(tuple(other for other in self.world if other != kind))
        return None if rest is None else self.whole.samples_per_sec / rest.samples_per_sec - 1


def forecast(
    cohorts: Sequence[Cohort], global_batch_size: int, buckets: Sequence[int], cost: AllreduceCost
) -> Forecast:
    """Forecast a job with the fastest split of its global batch; a rank may get no samples."""
    costs = CostTable.from_costs([cohort.cost for cohort in cohorts])
    ranks = np.array([cohort.ranks for cohort in cohorts])
    columns = (column.tolist() for column in split_cohorts(costs, ranks, global_batch_size))
    shares = [
        CohortShare(cohort, share, count)
        for cohort, samples, fewer in zip(cohorts, *columns, strict=True)
        for share, count in ((samples, cohort.ranks - fewer), (samples - 1, fewer))
        if count
    ]
    slowest = max(shares, key=lambda share: share.seconds)
    micro_batches = slowest.cohort.cost.micro_batches(slowest.samples)
    return Forecast(shares, exposed_seconds(slowest.seconds, buckets, cost, micro_batches))


def forecast_subsets(
    cohorts: Sequence[Cohort],
    global_batch_size: int,
    buckets: Sequence[int],
    measured: Sequence[MeasuredAllreduce],
) -> SubsetForecasts:
    """Forecast the job for the `subsets` of its device kinds."""
    world = ranks_per_kind(cohorts)
    forecasts = {}
    for subset in subsets(tuple(world)):
        chosen = [cohort for cohort in cohorts if cohort.kind in subset]
        cost = scale_allreduce(measured, {kind: world[kind] for kind in subset})
        forecasts[subset] = forecast(chosen, global_batch_size, buckets, cost)
    return SubsetForecasts(world, global_batch_size, forecasts)


def ranks_per_kind(cohorts: Iterable[Cohort]) -> dict[str, int]:
    """Count the ranks of each kind."""
    counts = Counter[str]()
    for cohort in cohorts:
        counts[cohort.kind] += cohort.ranks
    return dict(counts)


def scale_cohorts(measured: Sequence[Cohort], wanted: Mapping[str, int]) -> list[Cohort]:
    """Return the ranks of a larger world, repeating the measured ranks of each kind in turn."""
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
    """Return every subset of kinds; for more than 8 kinds, each alone, all but one, and all."""
    count = len(kinds)
    sizes = range(1, count + 1) if count <= _MAX_KINDS_FOR_ALL_SUBSETS else (1, count - 1, count)
    return [subset for size in sizes for subset in itertools.combinations(kinds, size)]
