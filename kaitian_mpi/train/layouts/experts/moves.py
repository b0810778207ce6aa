"""Moves experts while a run trains, if their tokens or the ranks' speeds have changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kaitian_mpi.balance.expert_plan import replace_experts
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.experts import Experts
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.train.layouts.experts.measure import ExpertFacts, ExpertsPlan
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.measure.plan import Profiles
from kaitian_mpi.train.step import Step, StepObserver
from kaitian_mpi.train.step_times import StepReports

_WINDOW, _LEAST_STEPS = 10, 4


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


class ExpertMoves(StepObserver):
    """Finds out, when epochs end and checkpoints are due, whether experts are worth a move."""

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
        self._config = config
        self._loop = loop
        self._mixtures = mixtures
        self._facts = facts
        self._profiles = profiles
        self._follow = follow
        assert isinstance(loop.plan, ExpertsPlan)
        self._placement = loop.plan.placement
        self._samples = sum(self._placement.batch_sizes)
        self._seconds: deque[np.ndarray] = deque(maxlen=_WINDOW)
        self._counts: deque[np.ndarray] = deque(maxlen=_WINDOW)

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        if reports is None:
            return
        times, every = reports.times, self._config.checkpoint_every
        if times.samples.sum() == self._samples and (times.steps > 0).all():
            self._seconds.append(times.work_sec)
            counts = [count for mixture in self._mixtures for count in mixture.tokens_by_expert]
            self._counts.append(np.array(counts, dtype=float))
        if reports.wants_checkpoint.any() or (every and step.number % every == 0):
            self.epoch_ends()

    def epoch_ends(self) -> None:
        loop, progress = self._loop, self._loop.progress
        if len(self._seconds) < _LEAST_STEPS:
            return
        world = loop.world
        base = self._profiles.plan(self._config, world)
        moves: tuple[list[float], list[float], str] | None = None
        if world.rank == 0:
            job = self._facts.job(self._config, world, base)
            tokens = tokens_like(self._facts, np.sum(self._counts, axis=0))
            work = np.median(self._seconds, axis=0).tolist()
            left = progress.total_steps - progress.step
            replacement = replace_experts(job, self._placement, tokens, work, left)
            if replacement is not None:
                moves = tokens, replacement.factors, replacement.text
        self._seconds.clear()
        self._counts.clear()
        moves = gather_values(world.comm, moves)[0]
        if moves is None:
            return
        tokens, factors, text = moves
        by_place: Mapping[str, float] = {
            info.place: factor for info, factor in zip(world.infos, factors, strict=True)
        }
        self._follow(self._facts.observed(tokens, by_place))
        speeds = ", ".join(f"{factor:.2f}" for factor in factors)
        text = f"ranks take {speeds} times what was planned: {text}"
        print_rank_0(world, f"step {progress.step}: {text}")
        loop.mark_outdated()


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
