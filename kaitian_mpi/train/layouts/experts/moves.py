"""Moves experts while a run trains, if their tokens or the ranks' speeds have changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kaitian_mpi.balance.expert_plan import replace_experts
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.experts import Experts
from kaitian_mpi.train.layouts.experts.measure import ExpertFacts, ExpertsPlan
from kaitian_mpi.train.layouts.replanning import WINDOW, Proposal, Replanning
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.measure.plan import Profiles
from kaitian_mpi.train.step import Step, StepObserver
from kaitian_mpi.train.step_times import StepReports


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


class ExpertMoves(Replanning):
    """Finds out whether other places of the experts are worth a move."""

    def __init__(
        self,
        config: TrainingConfig,
        loop: Loop,
        mixtures: Sequence[Experts],
        facts: ExpertFacts,
        profiles: Profiles,
        follow: Callable[[ExpertFacts], None],
    ) -> None:
        """Follow a loop.

        Args:
            config: the run's.
            loop: whose steps to follow.
            mixtures: of the model.
            facts: by which the experts are placed.
            profiles: of the ranks' rows.
            follow: called with the facts by which the next loop is to be planned.
        """
        assert isinstance(loop.plan, ExpertsPlan)
        self._mixtures = mixtures
        self._facts = facts
        self._profiles = profiles
        self._plan_by = follow
        self._placement = loop.plan.placement
        self._counts: deque[np.ndarray] = deque(maxlen=WINDOW)
        super().__init__(config, loop, sum(self._placement.batch_sizes))

    def _step_counts(self) -> None:
        counts = [count for mixture in self._mixtures for count in mixture.tokens_by_expert]
        self._counts.append(np.array(counts, dtype=float))

    def _propose(self, work_sec: list[float], steps_left: int) -> Proposal | None:
        world, counts = self._loop.world, np.sum(self._counts, axis=0)
        self._counts.clear()
        base = self._profiles.plan(self._config, world)
        if world.rank != 0:
            return None
        job = self._facts.job(self._config, world, base)
        tokens = tokens_like(self._facts, counts)
        found = replace_experts(job, self._placement, tokens, work_sec, steps_left)
        return None if found is None else Proposal(list(found.factors), found.text, tokens)

    def _follow(self, factors: Mapping[str, float], facts: Any) -> None:
        self._plan_by(self._facts.observed(facts, factors))


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
