"""Predicts a step with experts placed on ranks, and learns from steps where that was wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kaitian_mpi.balance.expert_moves import Placements
from kaitian_mpi.balance.experts import ExpertPlacement, ExpertsJob, RankFactors

_MIN_CHANGE = 1.1  # of the ranks' speeds to each other; else it is noise


class Observed(NamedTuple):
    """What some steps have taken, with a placement."""

    tokens: Sequence[float]
    """By expert, the tokens that it got, for a sample of the global batch."""
    dense_sec: Sequence[float]
    """By rank, the seconds of computing in a step, without experts."""
    expert_sec: Sequence[float]
    """By rank, those of experts."""
    step_sec: float


class Calibration(NamedTuple):
    """What is known better by steps than by the measurements from which they were planned."""

    factors: list[RankFactors]
    """By rank, in addition to those by which it was planned."""
    work_factors: list[float]
    """By rank, how many times as long as planned it computes."""
    residual_sec: float
    """See `ExpertsJob`."""

    def apply(self, job: ExpertsJob, tokens: Sequence[float]) -> ExpertsJob:
        """Return a job as it is by this."""
        pairs = zip(job.ranks, self.factors, strict=True)
        ranks = tuple(rank.scaled(factors) for rank, factors in pairs)
        return replace(job, tokens=tuple(tokens), ranks=ranks, residual_sec=self.residual_sec)


def calibrate(
    job: ExpertsJob, placement: ExpertPlacement, observed: Observed, is_first: bool
) -> Calibration:
    """Return how the steps that were observed differ from what is predicted of them.

    Args:
        job: by which the placement was planned.
        placement: of the experts.
        observed: the steps.
        is_first: whether the ranks' measured speeds are of the start, in which nothing else was
            computed. Else small differences between ranks are noise.
    """
    by_tokens = replace(job, tokens=tuple(observed.tokens))
    dense, experts = planned_computing(by_tokens, placement)
    work_sec = map(sum, zip(observed.dense_sec, observed.expert_sec, strict=True))
    planned_sec = map(sum, zip(dense, experts, strict=True))
    work_factors = [
        max(seconds, 1e-9) / max(expected, 1e-9)
        for seconds, expected in zip(work_sec, planned_sec, strict=True)
    ]
    # A rank that holds no expert is expected to compute them like all else.
    dense_factors = _ratios(observed.dense_sec, dense, work_factors)
    expert_factors = _ratios(observed.expert_sec, experts, work_factors)
    factors = [RankFactors(*pair) for pair in zip(dense_factors, expert_factors, strict=True)]
    if not is_first and max(work_factors) < _MIN_CHANGE * min(work_factors):
        # No rank's speed has changed by itself.
        work_factors = [sorted(work_factors)[len(work_factors) // 2]] * len(work_factors)
        factors = [RankFactors(factor, factor) for factor in work_factors]
    by_parts = Calibration(factors, work_factors, 0.0).apply(job, observed.tokens)
    residual_sec = observed.step_sec - predict(by_parts, placement).step_sec
    return Calibration(factors, work_factors, residual_sec)


def _ratios(
    measured: Sequence[float], planned: Sequence[float], without: Sequence[float]
) -> list[float]:
    """Return by rank what was measured of what was planned, or another number if that is 0."""
    columns = zip(measured, planned, without, strict=True)
    return [
        max(seconds, 1e-9) / expected if expected > 1e-9 else other
        for seconds, expected, other in columns
    ]


def predict(job: ExpertsJob, placement: ExpertPlacement) -> ExpertPlacement:
    """Return a placement with its times and memory as they are by this job."""
    placements, owners, rows = _as_arrays(job, placement)
    return placements.describe(owners, rows, placement.mirrors)


def planned_computing(
    job: ExpertsJob, placement: ExpertPlacement
) -> tuple[list[float], list[float]]:
    """Return each rank's seconds in a step of all but experts, and of experts."""
    placements, owners, rows = _as_arrays(job, placement)
    dense, experts = placements.times.computing(placements.loads(owners, rows))
    return dense.tolist(), experts.tolist()


def _as_arrays(
    job: ExpertsJob, placement: ExpertPlacement
) -> tuple[Placements, np.ndarray, np.ndarray]:
    """Return what computes a placement's times, each expert's owner and each rank's rows."""
    owners = np.array(placement.owners, dtype=int)
    rows = np.array(placement.batch_sizes, dtype=int)
    return Placements(job, placement.rounds), owners, rows
