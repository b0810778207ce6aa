"""What a job would reach: from what ranks and links cost, without running it."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kaitian_mpi.balance.communication import (
    AllreduceCost,
    MeasuredAllreduce,
    exposed_seconds,
)
from kaitian_mpi.balance.optimum import RankCost, least_time, samples_within
from kaitian_mpi.balance.planner import with_slopes
from kaitian_mpi.balance.scaling import scale_allreduce
from kaitian_mpi.errors import UserError

_LEAST_LOSS = 0.05  # a smaller one is no bottleneck
_LEAST_GAIN = 0.005  # what shows as +1%
_MOST_KINDS_FOR_EVERY_SUBSET = 8


@dataclass(frozen=True)
class Cohort:
    """Ranks of one kind that cost alike."""

    kind: str
    cost: RankCost
    ranks: int = 1
    """How many, at least 1."""


@dataclass(frozen=True)
class Share:
    """So many samples per step for each of so many ranks that cost alike."""

    cohort: Cohort
    samples: int
    ranks: int

    @property
    def seconds(self) -> float:
        """How long such a rank computes per step."""
        return self.cohort.cost.seconds(self.samples)


@dataclass(frozen=True)
class Forecast:
    """A job on paper. Seconds are of one step."""

    shares: tuple[Share, ...]
    """In the order of the cohorts, of one cohort the larger share first."""
    exposed_sec: float
    """Communication that is not hidden behind computing."""

    @property
    def batch_sizes(self) -> list[int]:
        """Samples per step of each rank, in the order of the cohorts."""
        return [share.samples for share in self.shares for _ in range(share.ranks)]

    @property
    def compute_sec(self) -> float:
        """What the slowest rank computes."""
        return max(share.seconds for share in self.shares)

    @property
    def step_sec(self) -> float:
        """Computing and what communication adds to it."""
        return self.compute_sec + self.exposed_sec

    @property
    def samples_per_sec(self) -> float:
        """Of the whole job."""
        return sum(share.samples * share.ranks for share in self.shares) / self.step_sec

    @property
    def efficiency(self) -> float:
        """Samples per second over the sum of what each rank reaches alone at its share, in (0, 1].

        Alone is without communicating; a rank without a sample counts with its rate at one.
        """
        alone = math.fsum(
            share.ranks * max(share.samples, 1) / share.cohort.cost.seconds(max(share.samples, 1))
            for share in self.shares
        )
        return min(1.0, self.samples_per_sec / alone)  # rounding may end a hair above

    @property
    def losses(self) -> dict[str, float]:
        """What keeps the job from 1/beta_i samples per second on every rank, as parts of a step.

        Each rank's step is beta*b of work, alpha*k of fixed cost, waiting for the slowest rank and
        exposed communication. The mean over the ranks, weighted by 1/beta_i, makes parts of what
        the devices could do, so that a slow rank that waits costs little. With the work they sum
        to 1.
        """
        whole = math.fsum(share.ranks / share.cohort.cost.model.beta_sec for share in self.shares)
        compute_sec, step_sec = self.compute_sec, self.step_sec
        parts = {"communication": self.exposed_sec / step_sec, "waiting": 0.0}
        for share in self.shares:
            model = share.cohort.cost.model
            weight = share.ranks / model.beta_sec / whole / step_sec
            fixed_sec = model.alpha_sec * share.cohort.cost.micro_batches(share.samples)
            name = f"fixed cost of a step on {share.cohort.kind}"
            parts[name] = parts.get(name, 0.0) + weight * fixed_sec
            parts["waiting"] += weight * (compute_sec - share.seconds)
        return parts

    @property
    def bottleneck(self) -> str:
        """What most of the lost time goes to, in a few words."""
        name, part = max(self.losses.items(), key=lambda loss: loss[1])
        if part < _LEAST_LOSS:
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
        return f"waiting: {idle:,} of {sum(s.ranks for s in self.shares):,} ranks get no sample"


@dataclass(frozen=True)
class SubsetForecasts:
    """The forecasts of parts of a world, at the same global batch."""

    kinds: tuple[str, ...]
    """Of the whole world."""
    forecasts: Mapping[tuple[str, ...], Forecast]
    """By the kinds that take part, in the order of `kinds`."""
    notes: tuple[str, ...]
    """What was guessed, as it had not been measured."""

    @property
    def whole(self) -> Forecast:
        """The forecast with every rank."""
        return self.forecasts[self.kinds]

    @property
    def best(self) -> tuple[str, ...]:
        """The kinds that are fastest together; of equals the fewest."""
        return max(
            self.forecasts, key=lambda kinds: (self.forecasts[kinds].samples_per_sec, -len(kinds))
        )

    def gain(self, kind: str) -> float | None:
        """Return what a kind adds: 0.3 for 30% more samples/s with it; None for the only kind."""
        rest = tuple(other for other in self.kinds if other != kind)
        if not rest:
            return None
        return self.whole.samples_per_sec / self.forecasts[rest].samples_per_sec - 1

    def worth(self, kind: str) -> str:
        """Say whether a kind is worth having in the job."""
        rate = self.whole.samples_per_sec
        gain = self.gain(kind)
        if gain is None:
            return f"with {kind} {show_rate(rate)} samples/s: the only kind"
        verdict = "worth it" if gain >= _LEAST_GAIN else "not worth it"
        return (
            f"with {kind} {show_rate(rate)} samples/s, without {show_rate(rate / (1 + gain))}: "
            f"{verdict} ({gain:+.0%})"
        )


def show_rate(rate: float) -> str:
    """Return a rate in three digits or more, with commas."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def forecast(
    cohorts: Sequence[Cohort],
    global_batch_size: int,
    buckets: Sequence[int],
    allreduce: AllreduceCost,
) -> Forecast:
    """Forecast a job under the fastest split of its global batch.

    The split is `fastest_split`'s, found for ranks that cost alike at once. A rank may get nothing.

    Args:
        cohorts: the ranks; at least one.
        global_batch_size: samples per step of the whole job, at least 1.
        buckets: bytes of DDP's buckets, in the order reduced.
        allreduce: what one costs among all these ranks.

    Raises:
        ValueError: there is no sample or no rank.
    """
    if global_batch_size < 1 or not cohorts:
        raise ValueError(
            f"found {global_batch_size} samples and {len(cohorts)} cohorts, needed at least one"
        )
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
    """Forecast the job on the ranks of some kinds only, for every choice of kinds.

    Of more than 8 kinds: for each alone, for all, and for all without each.

    Args:
        cohorts: the whole world's ranks.
        global_batch_size: as `forecast`, the same for every choice.
        buckets: as `forecast`.
        measured: allreduces; see `scale_allreduce`.

    Raises:
        UserError: what an allreduce costs cannot be told from `measured`.
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


def scaled_cohorts(measured: Sequence[Cohort], wanted: Mapping[str, int]) -> list[Cohort]:
    """Return the ranks of a world in which each kind's take the measured ranks' costs in turn.

    Args:
        measured: one cohort per measured rank.
        wanted: how many ranks of each kind, at least 1 each.

    Raises:
        UserError: a kind was not measured.
    """
    known = list(dict.fromkeys(cohort.kind for cohort in measured))
    scaled = []
    for kind, ranks in wanted.items():
        models = [cohort for cohort in measured if cohort.kind == kind]
        if not models:
            raise UserError(
                f"found kind {kind!r}, needed one that was measured: {', '.join(known)}; correct "
                "the name, or run kaitian-bench with such a device"
            )
        turns, more = divmod(ranks, len(models))
        counts = [turns + (index < more) for index in range(len(models))]
        scaled += [
            dataclasses.replace(model, ranks=count)
            for model, count in zip(models, counts, strict=True)
            if count
        ]
    return scaled


def _with_slopes(cohorts: Sequence[Cohort], global_batch_size: int) -> list[Cohort]:
    ranks = sum(cohort.ranks for cohort in cohorts)
    # As many samples for one rank of each cohort as these have in the whole world.
    samples = max(1, round(global_batch_size * len(cohorts) / ranks))
    costs = with_slopes([cohort.cost for cohort in cohorts], samples)
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
    samples = within(least_time(capacity, total, alone))
    return _without_surplus(cohorts, samples.tolist(), total)


def _without_surplus(cohorts: Sequence[Cohort], samples: list[int], total: int) -> list[Share]:
    surplus = sum(b * cohort.ranks for b, cohort in zip(samples, cohorts, strict=True)) - total
    # The heap's first are the ranks that end last, of several the highest: as in `fastest_split`.
    last_to_end = [
        (-cohort.cost.seconds(b), -index, -b, cohort.ranks)
        for index, (cohort, b) in enumerate(zip(cohorts, samples, strict=True))
    ]
    heapq.heapify(last_to_end)
    while surplus > 0:
        _, negative_index, negative_samples, ranks = heapq.heappop(last_to_end)
        fewer = min(surplus, ranks)
        surplus -= fewer
        sec = cohorts[-negative_index].cost.seconds(-negative_samples - 1)
        heapq.heappush(last_to_end, (-sec, negative_index, negative_samples + 1, fewer))
        if ranks > fewer:  # then the surplus is gone, and the time is of no use any more
            last_to_end.append((0.0, negative_index, negative_samples, ranks - fewer))
    ordered = sorted(last_to_end, key=lambda entry: (-entry[1], entry[2]))
    return [Share(cohorts[-index], -samples, ranks) for _, index, samples, ranks in ordered]


def subsets(kinds: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return every choice of kinds; of more than 8, each alone, all, and all without each."""
    sizes: Iterable[int] = range(1, len(kinds) + 1)
    if len(kinds) > _MOST_KINDS_FOR_EVERY_SUBSET:
        sizes = (1, len(kinds) - 1, len(kinds))
    return [subset for size in sizes for subset in itertools.combinations(kinds, size)]
