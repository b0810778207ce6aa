"""Measures what a model's experts take on each rank, and plans rows and experts from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.expert_plan import place_experts
from kaitian_mpi.balance.experts import (
    DEFAULT_CHUNKS,
    Expert,
    ExpertPlacement,
    ExpertRank,
    ExpertsJob,
    RankFactors,
)
from kaitian_mpi.balance.ownership import NO_MIRROR
from kaitian_mpi.balance.pipeline import Hop
from kaitian_mpi.balance.records import rebuild
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.layouts.experts.expert_timer import ExpertTimer, RankExperts
from kaitian_mpi.train.layouts.experts.names import expert_names
from kaitian_mpi.train.layouts.links import measure_links
from kaitian_mpi.train.measure.equal_devices import alike_ranks
from kaitian_mpi.train.measure.plan import Plan, Profiles
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.task import aside

_PRIOR_TOKENS = 16.0  # of an expert, as if all got the same: a few samples say little
_AS_FAST = 1.25  # equal devices whose times differ by less have the same
_UNMEASURED = RankCost(0.0, 1e-6)


@dataclass(frozen=True, kw_only=True)
class ExpertsPlan(Plan):
    """The ranks' batch sizes, and the rank of each expert."""

    placement: ExpertPlacement
    mixtures: tuple[int, ...]
    """By expert, the number of its mixture."""
    is_measured: bool
    """Whether the times of the placement are predictions; else all ranks count as equally fast."""

    def describe(self, infos: Sequence[RankInfo]) -> dict[str, Any]:
        ranks = [info.world_rank for info in infos]
        names = expert_names(self.mixtures)
        placement = self.placement
        held = [
            [names[number] for number in placement.experts_of(rank)] for rank in range(len(ranks))
        ]
        mirrored = [
            [names[n] for n, mirror in enumerate(placement.mirrors) if mirror == rank]
            for rank in range(len(ranks))
        ]
        return {
            "experts": {
                "by_rank": held,
                "mirrored_by_rank": mirrored,
                "micro_batches": placement.rounds,
                "predicted_step_sec": placement.step_sec if self.is_measured else None,
            }
        }


@dataclass(frozen=True)
class ExpertFacts:
    """The measurements from which rows and experts are planned; the same on every rank."""

    experts: tuple[Expert, ...]
    tokens: tuple[float, ...]
    """By expert, the tokens that it gets for a sample of the global batch."""
    by_place: Mapping[str, ExpertRank]
    """By place, a rank without the cost of its rows."""
    links: Mapping[str, Hop]
    factors: Mapping[str, RankFactors] = field(default_factory=dict)
    """By place, how many times as long as measured a rank takes in training."""
    residual_sec: float = 0.0
    """See `ExpertsJob`."""
    chunks: int = 0
    """The number of chunks in which tokens have traveled fastest; 0: it was not tried."""
    owners: tuple[str, ...] = ()
    """By expert, the place of the rank that holds it; empty before they are given out."""
    mirrors: tuple[str, ...] = ()
    """By expert, the place of its mirror; an empty text if there is none."""

    def plan(self, config: TrainingConfig, world: World, profiles: Profiles) -> ExpertsPlan:
        """Plan the rows and experts of these ranks. Collective.

        Raises:
            AgreedError: the experts do not fit the ranks' memory.
        """
        base = profiles.plan(config, world)
        planned: dict[str, Any] | str | None = None
        if world.rank == 0:  # others may round otherwise
            try:
                now = self.whereabouts(world)
                planned = asdict(place_experts(self.job(config, world, base), *now))
            except UserError as error:
                planned = str(error)
        planned = gather_values(world.comm, planned)[0]
        if isinstance(planned, str):
            raise AgreedError(planned)
        placement: ExpertPlacement = rebuild(ExpertPlacement, planned)
        rows = placement.batch_sizes[world.rank]
        limit = base.micro_batch_size
        if placement.rounds > 1 or limit is not None:
            limit = max(base.min_batch, math.ceil(rows / placement.rounds))
        return ExpertsPlan(
            batch_sizes=list(placement.batch_sizes),
            scores=base.scores,
            costs=None,  # of rows only: what a rank computes besides would look like slowness
            micro_batch_size=limit,
            min_batch=base.min_batch,
            placement=placement,
            mixtures=tuple(expert.mixture for expert in self.experts),
            is_measured=base.costs is not None,
        )

    def job(self, config: TrainingConfig, world: World, base: Plan) -> ExpertsJob:
        """Return the measurements from which these ranks' part is planned.

        `base` has their costs, and the batch sizes if these are not to be planned.
        """
        is_given = base.costs is None or config.batch_policy == "paper"
        costs = base.costs or [_UNMEASURED] * world.size
        ranks = [
            replace(self.by_place[info.place], cost=cost).scaled(self._factors_at(info.place))
            for info, cost in zip(world.infos, costs, strict=True)
        ]
        configured_chunks = (
            DEFAULT_CHUNKS if config.expert_chunks == "auto" else int(config.expert_chunks)
        )
        return ExpertsJob(
            self.experts,
            tuple(ranks),
            self.tokens,
            sum(base.batch_sizes),
            base.min_batch,
            config.micro_batch_size,
            tuple(base.batch_sizes) if is_given else (),
            is_whole=config.sync_bn,
            links=self.links,
            chunks=self.chunks or configured_chunks,
            has_mirrors=config.mirrors and ulfm.is_enabled(),
            residual_sec=self.residual_sec,
        )

    def _factors_at(self, place: str) -> RankFactors:
        return self.factors.get(place, RankFactors())

    def planned_bytes(self, world: World, placement: ExpertPlacement) -> list[int]:
        """Return how many bytes each rank's device is to use at most. Not collective."""
        bases = [self.by_place[info.place].base_bytes for info in world.infos]
        return [int(a + b) for a, b in zip(bases, placement.bytes_by_rank, strict=True)]

    def placed(self, world: World, placement: ExpertPlacement) -> ExpertFacts:
        """Return these, for experts that are where they are placed."""
        places = [info.place for info in world.infos]
        return replace(
            self,
            owners=tuple(places[rank] for rank in placement.owners),
            mirrors=tuple("" if rank == NO_MIRROR else places[rank] for rank in placement.mirrors),
        )

    def observed(
        self, tokens: Sequence[float], factors: Mapping[str, RankFactors], residual_sec: float
    ) -> ExpertFacts:
        """Return these, with the experts' tokens and the ranks' speeds as training shows them.

        The factors, by place, are in addition to those that there were.
        """
        scaled = {place: self._factors_at(place).times(by) for place, by in factors.items()}
        return replace(
            self,
            tokens=tuple(tokens),
            factors={**self.factors, **scaled},
            residual_sec=residual_sec,
        )

    def whereabouts(self, world: World) -> tuple[list[int], list[int]]:
        """Return the rank that has each expert, and another one; -1: none of these."""
        ranks = {info.place: rank for rank, info in enumerate(world.infos)}
        owners = [ranks.get(place, NO_MIRROR) for place in self.owners]
        mirrors = [ranks.get(place, NO_MIRROR) for place in self.mirrors]
        pairs = zip(owners, mirrors, strict=True)
        return [mirror if owner == NO_MIRROR else owner for owner, mirror in pairs], mirrors


def find_facts(
    config: TrainingConfig, setup: Setup, world: World, takes_alike: bool = False
) -> ExpertFacts:
    """Measure the experts on each rank, and the tokens that they get. Collective.

    The model is not changed. If it `takes_alike`, and for a task without a loss, all ranks count as
    equally fast: nothing is timed.

    Raises:
        AgreedError: a rank has no memory for the model without its experts.
    """
    is_timed = not takes_alike and setup.task.loss is not None
    with agree_on_errors(world.comm):
        optimizers = setup.task.make_optimizers(setup.task.model)
    sleeping_barrier(world.comm)
    # Ranks may share cores, so each is timed while all others compute too.
    with agree_on_errors(world.comm), aside(world.device):
        timer = ExpertTimer(config, setup, world, is_timed)
        try:
            measured = timer.measure(optimizers)
        finally:
            barrier = world.comm.Ibarrier()
        while not barrier.Test():
            timer.keep_busy()
    enter_phase("comparing the benchmarks", waits=True, limited=False)
    gathered = gather_values(world.comm, (asdict(measured), world.threads))
    by_rank: list[RankExperts] = [rebuild(RankExperts, content) for content, _ in gathered]
    threads = [threads for _, threads in gathered]
    places = [info.place for info in world.infos]
    ranks = _equalized(world.infos, threads, [rank_experts.rank for rank_experts in by_rank])
    return ExpertFacts(
        _together([rank_experts.experts for rank_experts in by_rank]),
        tokens_per_sample(by_rank, is_timed),
        dict(zip(places, ranks, strict=True)),
        measure_links(world) if is_timed else {},
    )


def _together(by_rank: Sequence[Sequence[Expert]]) -> tuple[Expert, ...]:
    """Return the experts as rank 0 has measured them, with the most that any rank keeps."""
    most = [max(expert.kept_bytes for expert in column) for column in zip(*by_rank, strict=True)]
    pairs = zip(by_rank[0], most, strict=True)
    return tuple(replace(expert, kept_bytes=kept) for expert, kept in pairs)


def tokens_per_sample(by_rank: Sequence[RankExperts], is_timed: bool) -> tuple[float, ...]:
    """Return the tokens of each expert for a sample, by what all ranks have counted.

    If the experts are not timed, each of a mixture counts alike.
    """
    samples = sum(rank_experts.samples for rank_experts in by_rank)
    mixtures = np.array([expert.mixture for expert in by_rank[0].experts])
    if not samples:
        return (1.0,) * len(mixtures)
    counts = np.sum([rank_experts.counts for rank_experts in by_rank], axis=0).astype(float)
    for mixture in range(int(mixtures.max()) + 1):
        members = mixtures == mixture
        mean = counts[members].mean()
        if mean:
            prior = _PRIOR_TOKENS / mean if is_timed else math.inf
            weight = 1 / (1 + prior)
            counts[members] = mean + weight * (counts[members] - mean)
    tokens: list[float] = (counts / samples).tolist()
    return tuple(tokens)


def _equalized(
    infos: Sequence[RankInfo], threads: Sequence[int], ranks: Sequence[ExpertRank]
) -> list[ExpertRank]:
    """Return the ranks' measurements; equal devices of a host have the median of theirs."""
    equalized = list(ranks)
    for alike in alike_ranks(infos, threads):
        totals = [math.fsum(ranks[rank].token_sec) for rank in alike]
        if len(alike) < 2 or max(totals) > _AS_FAST * min(totals):
            continue
        pooled = [ranks[rank] for rank in alike]
        for rank in alike:
            equalized[rank] = replace(
                equalized[rank],
                fixed_sec=_medians([rank_facts.fixed_sec for rank_facts in pooled]),
                token_sec=_medians([rank_facts.token_sec for rank_facts in pooled]),
                update_sec=_medians([rank_facts.update_sec for rank_facts in pooled]),
            )
    return equalized


def _medians(by_rank: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(map(statistics.median, zip(*by_rank, strict=True)))
