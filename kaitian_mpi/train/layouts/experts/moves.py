"""Moves experts while a run trains, if their tokens or the ranks' speeds have changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Protocol

import numpy as np

from kaitian_mpi.balance.expert_plan import replace_experts
from kaitian_mpi.balance.expert_prediction import Observed, calibrate, predict
from kaitian_mpi.balance.experts import RankFactors
from kaitian_mpi.balance.rebalancer import RankSteps
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.experts import Experts
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.train.layouts.experts.chunk_trial import ChunkTrial
from kaitian_mpi.train.layouts.experts.engine import ExpertsEngine
from kaitian_mpi.train.layouts.experts.measure import ExpertFacts, ExpertsPlan
from kaitian_mpi.train.layouts.replanning import WINDOW, Proposal, Replanning
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.measure.plan import Profiles
from kaitian_mpi.train.step import Step, StepObserver
from kaitian_mpi.train.step_times import StepReports

_FIRST_STEPS = 6  # by whose median a plan is calibrated


class TokenCounts(StepObserver):
    """Counts the tokens of each expert, in the last micro-batch of each step of a loop."""

    def __init__(self, mixtures: Sequence[Experts]) -> None:
        self._mixtures = mixtures
        self._totals = [np.zeros(len(mixture.experts)) for mixture in mixtures]

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        for total, mixture in zip(self._totals, self._mixtures, strict=True):
            total += mixture.tokens_by_expert

    def fractions(self) -> list[float] | None:
        """Return each expert's fraction of the tokens of its mixture; None before a step."""
        if not any(total.any() for total in self._totals):
            return None
        parts = [total / max(1.0, total.sum()) for total in self._totals]
        shares: list[float] = np.concatenate(parts).tolist()
        return shares


class KeepsFacts(Protocol):
    """Plans experts by facts, and keeps them from one loop to the next."""

    @property
    def facts(self) -> ExpertFacts: ...
    @property
    def is_calibrated(self) -> bool: ...
    def follow(self, facts: ExpertFacts, step_sec: float) -> None: ...


class ExpertMoves(Replanning):
    """Compares the time of steps with the planned one, and finds out if a move is worth it.

    A run's first steps calibrate its plan, also if it is static: in training, experts are slower
    than when they are timed alone.
    """

    def __init__(
        self,
        config: TrainingConfig,
        loop: Loop,
        mixtures: Sequence[Experts],
        trial: ChunkTrial,
        profiles: Profiles,
        keeper: KeepsFacts,
    ) -> None:
        """Follow a loop.

        Args:
            config: the run's.
            loop: whose steps to follow.
            mixtures: of the model.
            trial: of chunks, after which the steps count.
            profiles: of the ranks' rows.
            keeper: has the facts by which the experts are placed.
        """
        assert isinstance(loop.plan, ExpertsPlan)
        assert isinstance(loop.engine, ExpertsEngine)
        self._mixtures = mixtures
        self._trial = trial
        self._profiles = profiles
        self._keeper = keeper
        self._placement = loop.plan.placement
        self._calibrates = loop.plan.is_measured and not keeper.is_calibrated
        self._dispatcher = loop.engine.exchange.dispatcher
        self._computed_sec = 0.0
        self._counts: deque[np.ndarray] = deque(maxlen=WINDOW)
        self._expert_sec: deque[float] = deque(maxlen=WINDOW)
        self._step_sec: deque[float] = deque(maxlen=WINDOW)
        super().__init__(config, loop, sum(self._placement.batch_sizes))

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        before = self._computed_sec
        self._computed_sec = self._dispatcher.computed_sec
        if not self._trial.is_over:
            return
        self._expert_sec.append(self._computed_sec - before)
        super().step_done(step, reports)
        if self._calibrates and len(self._step_sec) == _FIRST_STEPS:
            self.epoch_ends()

    def epoch_ends(self) -> None:
        if self._calibrates or self._config.balance == "adaptive":
            super().epoch_ends()

    def _step_counts(self, times: RankSteps) -> None:
        counts = [count for mixture in self._mixtures for count in mixture.tokens_by_expert]
        self._counts.append(np.array(counts, dtype=float))
        self._step_sec.append(float((times.work_sec + times.wait_sec).max()))

    def _propose(self, work_sec: list[float], steps_left: int) -> Proposal | None:
        world = self._loop.world
        facts = self._keeper.facts
        is_first = self._calibrates
        self._calibrates = False
        tokens = tokens_like(facts, np.sum(self._counts, axis=0))
        expert_sec = gather_values(world.comm, median(self._expert_sec))
        dense_sec = [
            max(0.0, rank_sec - of_experts)
            for rank_sec, of_experts in zip(work_sec, expert_sec, strict=True)
        ]
        observed = Observed(tokens, dense_sec, expert_sec, median(self._step_sec))
        for window in (self._counts, self._expert_sec, self._step_sec):
            window.clear()
        base = self._profiles.plan(self._config, world)
        if world.rank != 0:  # may round otherwise
            return None
        job = facts.job(self._config, world, base)
        calibration = calibrate(job, self._placement, observed, is_first)
        job = calibration.apply(job, tokens)
        replacement = replace_experts(job, self._placement, steps_left)
        if replacement is None and not is_first:
            return None
        now = predict(job, self._placement).step_sec
        text = replacement.text if replacement else f"predicted step {1e3 * now:.0f} ms"
        shown = {
            "tokens": tokens,
            "factors": calibration.factors,
            "residual_sec": calibration.residual_sec,
            "step_sec": now,
        }
        return Proposal(calibration.work_factors, text, shown, moves=replacement is not None)

    def _follow(self, factors: Mapping[str, float], facts: Any) -> None:
        pairs = zip(self._loop.world.infos, facts["factors"], strict=True)
        by_place = {info.place: RankFactors(*pair) for info, pair in pairs}
        observed = self._keeper.facts.observed(facts["tokens"], by_place, facts["residual_sec"])
        self._keeper.follow(observed, facts["step_sec"])


def tokens_like(facts: ExpertFacts, counts: np.ndarray) -> list[float]:
    """Return the tokens of each expert for a sample, divided within each mixture as counted."""
    tokens = np.array(facts.tokens)
    mixtures = np.array([expert.mixture for expert in facts.experts])
    for mixture in range(int(mixtures.max(initial=-1)) + 1):
        members = mixtures == mixture
        total = counts[members].sum()
        if total:
            tokens[members] = tokens[members].sum() * counts[members] / total
    observed: list[float] = tokens.tolist()
    return observed
