"""Forecasts the throughput of a job from measured costs, without running it."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kaitian_mpi.balance.allreduce_scaling import scale_allreduce
from kaitian_mpi.balance.communication import (
    AllreduceCost,
    MeasuredAllreduce,
    exposed_seconds,
)
from kaitian_mpi.balance.fastest_split import RankCost, samples_within, shortest_time
from kaitian_mpi.balance.planner import with_positive_slopes
from kaitian_mpi.errors import UserError

_MIN_LOSS = 0.05  # a smaller loss is not a bottleneck
_MIN_GAIN = 0.005  # shown as +1%
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

    @property
    def losses(self) -> dict[str, float]:
        """The causes of lost throughput, as parts of a step.

        Each rank's step consists of work (beta*b), fixed cost (alpha*k), waiting for the slowest
        rank and exposed communication. Each part is a mean over the ranks weighted by 1/beta_i,
        their peak rates, so that a slow rank that waits matters little. Together with the work they
        sum to 1.
        """
        total = math.fsum(share.ranks / share.cohort.cost.model.beta_sec for share in self.shares)
        compute_sec, step_sec = self.compute_sec, self.step_sec
        parts = {"communication": self.exposed_sec / step_sec, "waiting": 0.0}
        for share in self.shares:
            model = share.cohort.cost.model
            weight = share.ranks / model.beta_sec / total / step_sec
            fixed_sec = model.alpha_sec * share.cohort.cost.micro_batches(share.samples)
            name = f"fixed cost of a step on {share.cohort.kind}"
            parts[name] = parts.get(name, 0.0) + weight * fixed_sec
            parts["waiting"] += weight * (compute_sec - share.seconds)
        return parts

    @property
    def bottleneck(self) -> str:
        """The largest loss, in a few words."""
        name, part = max(self.losses.items(), key=lambda loss: loss[1])
        if part < _MIN_LOSS:
            return "compute: every rank is busy"
        if name == "communication":
            return f"communication ({part:.0%} of the step)"
        if name == "waiting":
            return f"{self._waiting()} ({part:.0%})"
        return f"the {name} ranks ({part:.0%})"

    def _waiting(self) -> str:
        idle = sum(share.ranks for share in self.shares if share.samples == 0)
        if idle == 0:
            return "waiting for the slowest rank"
        return f"waiting: {idle:,} of {sum(s.ranks for s in self.shares):,} ranks get no samples"


@dataclass(frozen=True)
class SubsetForecasts:
    """Forecasts for subsets of a world's device kinds, at the same global batch size."""

    kinds: tuple[str, ...]
    """The kinds of the whole world."""
    forecasts: Mapping[tuple[str, ...], Forecast]
    """By the kinds that take part, in the order of `kinds`."""
    notes: tuple[str, ...]
    """Costs that were estimated because they had not been measured."""

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

    def worth(self, kind: str) -> str:
        """Return a sentence on whether a kind is worth having in the job."""
        rate = self.whole.samples_per_sec
        gain = self.gain(kind)
        if gain is None:
            return f"with {kind} {format_rate(rate)} samples/s: the only kind"
        verdict = "worth it" if gain >= _MIN_GAIN else "not worth it"
        return (
            f"with {kind} {format_rate(rate)} samples/s, without {format_rate(rate / (1 + gain))}: "
            f"{verdict} ({gain:+.0%})"
        )


def format_rate(rate: float) -> str:
    """Format a rate with three significant digits or more and thousands separators."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def forecast(
    cohorts: Sequence[Cohort],
    global_batch_size: int,
    buckets: Sequence[int],
    allreduce: AllreduceCost,
) -> Forecast:
    """Forecast a job with the fastest split of its global batch.

    The split is that of `fastest_split`, computed per cohort. A rank may get no samples.

    Args:
        cohorts: the ranks; at least one.
        global_batch_size: samples per step over all ranks, at least 1.
        buckets: bytes of DDP's buckets, in the order reduced.
        allreduce: the cost of an allreduce among all these ranks.

    Raises:
        ValueError: there are no samples or no ranks.
    """
    if global_batch_size < 1 or not cohorts:
        raise ValueError("a forecast takes at least one sample and one cohort")
    shares = _fastest_shares(_with_slopes(cohorts, global_batch_size), global_batch_size)
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
    """Forecast the job for every subset of its device kinds.

    With more than 8 kinds: for each alone, for all, and for all but one.

    Args:
        cohorts: the whole world's ranks.
        global_batch_size: as in `forecast`, the same for every subset.
        buckets: as in `forecast`.
        measured: allreduces; see `scale_allreduce`.

    Raises:
        UserError: the cost of an allreduce cannot be estimated from `measured`.
    """
    kinds = tuple(dict.fromkeys(cohort.kind for cohort in cohorts))
    forecasts, notes = {}, []
    for subset in subsets(kinds):
        part = [cohort for cohort in cohorts if cohort.kind in subset]
        cost, guesses = scale_allreduce(measured, ranks_per_kind(part))
        forecasts[subset] = forecast(part, global_batch_size, buckets, cost)
        notes += guesses
    return SubsetForecasts(kinds, forecasts, tuple(dict.fromkeys(notes)))


def ranks_per_kind(cohorts: Iterable[Cohort]) -> dict[str, int]:
    """Count the ranks of each kind."""
    counts: dict[str, int] = {}
    for cohort in cohorts:
        counts[cohort.kind] = counts.get(cohort.kind, 0) + cohort.ranks
    return counts


def scale_cohorts(measured: Sequence[Cohort], wanted: Mapping[str, int]) -> list[Cohort]:
    """Return the ranks of a larger world, which take the costs of the measured ranks in turn.

    Args:
        measured: one cohort per measured rank.
        wanted: the number of ranks of each kind, at least 1 each.

    Raises:
        UserError: a kind was not measured.
    """
    known = list(dict.fromkeys(cohort.kind for cohort in measured))
    scaled = []
    for kind, ranks in wanted.items():
        models = [cohort for cohort in measured if cohort.kind == kind]
        if not models:
            raise UserError(
                f"kind {kind!r} was not measured, only {', '.join(known)}; correct the name, or "
                "measure again with such a device"
            )
        rounds, extra = divmod(ranks, len(models))
        counts = [rounds + (index < extra) for index in range(len(models))]
        scaled += [
            dataclasses.replace(model, ranks=count)
            for model, count in zip(models, counts, strict=True)
            if count
        ]
    return scaled


def _with_slopes(cohorts: Sequence[Cohort], global_batch_size: int) -> list[Cohort]:
    ranks = sum(cohort.ranks for cohort in cohorts)
    # The samples that one rank of each cohort would have together at equal shares.
    samples = max(1, round(global_batch_size * len(cohorts) / ranks))
    costs = with_positive_slopes([cohort.cost for cohort in cohorts], samples)
    return [
        c if c.cost is cost else dataclasses.replace(c, cost=cost)
        for c, cost in zip(cohorts, costs, strict=True)
    ]


def _fastest_shares(cohorts: Sequence[Cohort], total: int) -> list[Share]:
    alpha = np.array([cohort.cost.model.alpha_sec for cohort in cohorts])
    beta = np.array([cohort.cost.model.beta_sec for cohort in cohorts])
    limits = (cohort.cost.largest_micro_batch for cohort in cohorts)
    limit = np.array([total if most is None else min(most, total) for most in limits])
    ranks = np.array([cohort.ranks for cohort in cohorts])

    def within(seconds: float) -> np.ndarray:
        return samples_within(seconds, alpha, beta, limit, total)

    def capacity(seconds: float) -> np.ndarray:
        return within(seconds) * ranks

    alone = min(cohort.cost.seconds(total) for cohort in cohorts)
    samples = within(shortest_time(capacity, total, alone))
    return _remove_surplus(cohorts, samples.tolist(), total)


def _remove_surplus(cohorts: Sequence[Cohort], samples: list[int], total: int) -> list[Share]:
    surplus = sum(b * cohort.ranks for b, cohort in zip(samples, cohorts, strict=True)) - total
    # The heap's first entry are the ranks that finish last; of several, the highest ranks, as in
    # `fastest_split`.
    by_finish = [
        (-cohort.cost.seconds(b), -index, -b, cohort.ranks)
        for index, (cohort, b) in enumerate(zip(cohorts, samples, strict=True))
    ]
    heapq.heapify(by_finish)
    while surplus > 0:
        _, negative_index, negative_samples, ranks = heapq.heappop(by_finish)
        reduced = min(surplus, ranks)
        surplus -= reduced
        sec = cohorts[-negative_index].cost.seconds(-negative_samples - 1)
        heapq.heappush(by_finish, (-sec, negative_index, negative_samples + 1, reduced))
        if ranks > reduced:  # then the surplus is 0, and the time is no longer used
            by_finish.append((0.0, negative_index, negative_samples, ranks - reduced))
    ordered = sorted(by_finish, key=lambda entry: (-entry[1], entry[2]))
    return [Share(cohorts[-index], -samples, ranks) for _, index, samples, ranks in ordered]


def subsets(kinds: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return every subset of kinds; of more than 8, each alone, all, and all but one."""
    sizes: Iterable[int] = range(1, len(kinds) + 1)
    if len(kinds) > _MAX_KINDS_FOR_ALL_SUBSETS:
        sizes = (1, len(kinds) - 1, len(kinds))
    return [subset for size in sizes for subset in itertools.combinations(kinds, size)]
