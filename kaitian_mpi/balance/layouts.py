"""Compares the layouts of a job: what a step takes in each, and whether it fits the ranks' memory.

See docs/large-models.md for what the layouts are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from kaitian_mpi.balance.communication import AllreduceCost, ddp_buckets, exposed_seconds
from kaitian_mpi.balance.cost_model import CostTable, RankCost
from kaitian_mpi.balance.ownership import BUCKET_CAPS, Need
from kaitian_mpi.balance.pipeline_cost import Layer, PipelineJob, RankFacts
from kaitian_mpi.balance.pipeline_plan import plan_pipeline
from kaitian_mpi.balance.shares import split_cohorts

REPLICATE = "replicate"
SHARD = "shard"
PIPELINE = "pipeline"
_AS_FAST = 1.03  # a layout that takes no longer than this times the fastest is as good
_MOST = 1e18  # of what a file says, so that no sum overflows
_FORWARD = 1 / 3  # part of a step's compute time


@dataclass(frozen=True)
class LayoutJob:
    """What the layouts are compared by."""

    chain: PipelineJob
    """The ranks, and the model's layers: only one, if it cannot be divided."""
    whole: Layer
    """The model."""
    needs: tuple[Need, ...]
    """The memory of shards: of gradients and state, and if that can be, of parameters in parts."""
    allreduce_cost: AllreduceCost
    scatter_cost: AllreduceCost
    """Of a sum in parts, by the bytes of the whole."""
    gather_cost: AllreduceCost
    """Of bringing all parts to all ranks, by the bytes of the whole."""
    on_host: bool = False
    """Whether a rank computes on its host: then what travels takes the cores that compute, and the
    model is beside its copy in the benchmark of replicate."""
    has_mirrors: bool = False
    """Whether two ranks step each part of a shard."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why the task or the settings rule a layout out."""

    @property
    def memory(self) -> np.ndarray:
        """The bytes that each rank has."""
        return np.array([rank.memory_bytes for rank in self.chain.ranks])

    @property
    def base(self) -> np.ndarray:
        """The bytes that each rank uses besides parameters, state and activations."""
        return np.array([rank.base_bytes for rank in self.chain.ranks])

    @property
    def least(self) -> float:
        """The bytes of the activations of the smallest micro-batch."""
        return self.chain.min_batch * self.whole.kept_bytes

    def stepping(self, part: np.ndarray) -> np.ndarray:
        """Return the bytes that each rank's optimizer allocates to step its part, all at once."""
        at_once = np.array([rank.steps_at_once for rank in self.chain.ranks])
        return part * self.whole.trained_bytes * at_once

    def update_sec(self, part: np.ndarray) -> np.ndarray:
        """Return each rank's seconds to step its part of the parameters."""
        count, size = self.whole.trained, self.whole.trained_bytes
        ranks = zip(self.chain.ranks, part.tolist(), strict=True)
        # Each has some rows of most large parameters, and of the small ones few.
        return np.array([rank.update_seconds(own**0.5 * count, own * size) for rank, own in ranks])

    def handling_sec(self, layout: str) -> np.ndarray:
        """Return each rank's seconds of a step for what is neither computing nor the optimizer."""
        size = self.whole.trained, self.whole.trained_bytes
        return np.array([rank.handling_seconds(layout, *size) for rank in self.chain.ranks])

    def check(self) -> None:
        """Check what a file says.

        Raises:
            ValueError: no prediction can be made of it.
        """
        ranks, numbers = self.chain.ranks, _numbers(asdict(self))
        is_timed = bool(ranks) and all(sum(rank.sample_sec) > 0 for rank in ranks)
        if not is_timed or not all(0 <= number <= _MOST for number in numbers):  # False for NaN
            raise ValueError("a number of the layouts is out of range")

    def in_world(
        self, world: Mapping[str, int], global_batch: int, allreduce: AllreduceCost
    ) -> LayoutJob:
        """Return the job of a world with so many ranks of each kind, like those measured in turn.

        The parts of an allreduce are scaled as the whole.
        """
        by_kind: dict[str, list[RankFacts]] = {}
        for rank in self.chain.ranks:
            by_kind.setdefault(rank.kind, []).append(rank)
        ranks = tuple(
            rank
            for kind, count in world.items()
            for rank in itertools.islice(itertools.cycle(by_kind[kind]), count)
        )
        then = self.allreduce_cost.seconds(BUCKET_CAPS[1])
        longer = allreduce.seconds(BUCKET_CAPS[1]) / then if then else 1.0

        def scaled(cost: AllreduceCost) -> AllreduceCost:
            if not then:  # one rank was measured; each is half of an allreduce
                return AllreduceCost(allreduce.latency_sec / 2, allreduce.sec_per_byte / 2)
            return AllreduceCost(cost.latency_sec * longer, cost.sec_per_byte * longer)

        return replace(
            self,
            chain=replace(self.chain, ranks=ranks, global_batch=global_batch),
            allreduce_cost=allreduce,
            scatter_cost=scaled(self.scatter_cost),
            gather_cost=scaled(self.gather_cost),
        )


@dataclass(frozen=True)
class Prediction:
    """What a layout takes, or why it cannot be."""

    layout: str
    step_sec: float | None = None
    """None: it is impossible."""
    bytes_by_rank: tuple[int, ...] = ()
    """Of each rank's memory, at least: with the smallest micro-batches."""
    why: str = ""
    """Why it is impossible; or what there is to know about it."""


def predict_layouts(job: LayoutJob) -> list[Prediction]:
    """Return the predictions for replicate, shard and pipeline, in this order."""
    predict = {REPLICATE: _replicate, SHARD: _shard, PIPELINE: _pipeline}
    return [
        Prediction(layout, why=job.refused[layout]) if layout in job.refused else own(job)
        for layout, own in predict.items()
    ]


def choose(predictions: Sequence[Prediction]) -> Prediction | None:
    """Return the fastest that is possible, of about equally fast ones the first; None if none is.

    The first is the simplest: in replicate, each rank can continue without any other.
    """
    least = min((each.step_sec for each in predictions if each.step_sec), default=0.0)
    return next((p for p in predictions if p.step_sec and p.step_sec <= _AS_FAST * least), None)


def table_of(predictions: Sequence[Prediction]) -> list[list[str]]:
    """Return the rows of a table, the first of which has its columns."""
    rows = [["layout", "ms a step", "MB by rank, at least", ""]]
    for each in predictions:
        sizes = sorted(round(size / 1e6) for size in each.bytes_by_rank)
        memory = " to ".join(f"{size:,}" for size in dict.fromkeys([*sizes[:1], *sizes[-1:]]))
        seconds = f"{1e3 * each.step_sec:,.1f}" if each.step_sec else "-"
        rows.append([each.layout, seconds, memory or "-", each.why])
    return rows


def _replicate(job: LayoutJob) -> Prediction:
    whole = job.whole
    size = whole.weight_bytes * (1 + job.on_host) + whole.state_bytes + whole.cast_bytes
    # A rank goes on with its next step as soon as it has the sums: so its optimizer counts with it.
    all_of_it = np.ones(len(job.chain.ranks))
    each_step = job.handling_sec(REPLICATE) + job.update_sec(all_of_it)
    found = _divide(job, REPLICATE, job.base + size, job.stepping(all_of_it), each_step)
    if isinstance(found, Prediction):
        return found
    computing, rounds = float(found.computing.max()), int(found.rounds.max())
    buckets = ddp_buckets(whole.trained_bytes)
    exposed = exposed_seconds(computing, buckets, job.allreduce_cost, rounds)
    step = float((found.computing + each_step).max()) + exposed
    return Prediction(REPLICATE, step, found.needed)


def _shard(job: LayoutJob) -> Prediction:
    whole = job.whole
    for need in job.needs:
        fixed = job.base + whole.weight_bytes - need.freed + need.buffers
        if not need.freed:  # else a parameter's cast is kept no longer than itself
            fixed = fixed + whole.cast_bytes
        free = job.memory - fixed
        # Activations and the optimizer's own memory are not needed at once.
        of_owned = job.stepping(np.ones(len(free))) / max(need.owned, 1)
        room = np.maximum(0.0, np.minimum(free - job.least, free / (1 + of_owned)))
        if room.sum() >= need.owned:
            break
    else:
        needed = need.owned + (fixed + job.least).sum()
        why = f"needs {_mb(needed)} in all, and the ranks have {_mb(job.memory.sum())}"
        return Prediction(SHARD, why=why)
    part = room / max(room.sum(), 1.0)
    handling = job.handling_sec(SHARD)
    found = _divide(job, SHARD, fixed + part * need.owned, job.stepping(part), handling)
    if isinstance(found, Prediction):
        return found
    sizes = _buckets(whole.trained_bytes, need.bucket)
    # About half of what is done with gradients is done for each micro-batch.
    step = _in_rounds(found.computing + handling * (1 + found.rounds) / 2, found.rounds)
    rounds = int(found.rounds.max())
    of_round = float((found.computing / found.rounds).max())
    scattered = exposed_seconds(of_round, sizes, job.scatter_cost)
    # All wait for the sums, and then for all owners' values.
    update = float(job.update_sec(part).max()) * (1 + job.has_mirrors)
    step += rounds * scattered + update
    moved = whole.weight_bytes if need.freed else whole.trained_bytes
    gathered = sum(map(job.gather_cost.seconds, _buckets(moved, need.bucket)))
    if need.freed:  # for each forward and each backward
        step += 2 * rounds * gathered
    else:
        step += max(0.0, gathered - _FORWARD * of_round * (not job.on_host))
    return Prediction(SHARD, step, found.needed, "parameters in parts, too" if need.freed else "")


def _pipeline(job: LayoutJob) -> Prediction:
    plan = plan_pipeline(job.chain)
    if plan is None:
        return Prediction(PIPELINE, why="no division of the layers fits the ranks' memory")
    stages = f"{len(plan.stages)} stage{'s' * (len(plan.stages) > 1)}"
    how = f"{stages}, micro-batches of {plan.micro_batch}"
    return Prediction(PIPELINE, plan.step_sec, plan.bytes_by_rank, how)


class _Division(NamedTuple):
    """The fastest shares, and what they take."""

    computing: np.ndarray
    """Each rank's seconds."""
    rounds: np.ndarray
    """The micro-batches of each."""
    needed: tuple[int, ...]
    """Each rank's memory, at least."""


def _divide(
    job: LayoutJob,
    layout: str,
    fixed: np.ndarray,
    stepping: np.ndarray,
    other_sec: np.ndarray,
) -> _Division | Prediction:
    """Divide the global batch over ranks that have other bytes and seconds in each step, too.

    Of these bytes, those for `stepping` are not needed while there are activations.
    """
    chain, ranks = job.chain, len(job.chain.ranks)
    if chain.global_batch < chain.min_batch * ranks:
        why = f"a global batch of {chain.global_batch} is too small for {ranks} ranks"
        return Prediction(layout, why=why)
    needed = fixed + np.maximum(job.least, stepping)
    missing = needed - job.memory
    if (missing >= 1).any():  # a part of a byte may be rounding
        rank = int(missing.argmax())
        has = _mb(job.memory[rank])
        return Prediction(layout, why=f"needs {_mb(needed[rank])} on rank {rank}, which has {has}")
    table = CostTable.of([RankCost(sum(r.fixed_sec), sum(r.sample_sec)) for r in chain.ranks])
    room = np.floor((job.memory - fixed) / max(job.whole.kept_bytes, 1.0))
    room = np.minimum(room, chain.micro_batch or chain.global_batch)
    table = replace(table, largest_micro_batch=np.maximum(room, chain.min_batch))
    loaded = replace(table, alpha_sec=table.alpha_sec + other_sec)
    least = chain.min_batch
    samples, fewer = split_cohorts(loaded, np.ones(ranks, int), chain.global_batch, least)
    shares = samples - fewer
    rounds = np.ceil(shares / table.largest_micro_batch)
    return _Division(table.seconds(shares), rounds, tuple(map(int, needed)))


def _in_rounds(seconds: np.ndarray, rounds: np.ndarray) -> float:
    """Return the seconds of ranks that wait for each other after each of their micro-batches."""
    total = done = 0.0
    for count in np.unique(rounds).tolist():
        total += (count - done) * float((seconds / rounds)[rounds >= count].max())
        done = count
    return total


def _buckets(total: int, bucket: int) -> list[int]:
    full, rest = divmod(total, bucket)
    return [bucket] * full + [rest] * (rest > 0)


def _numbers(content: Any) -> list[float]:
    """Return all numbers in the content of a file."""
    if isinstance(content, bool) or content is None or isinstance(content, str):
        return []
    if isinstance(content, int | float):
        return [content]
    inside = content.values() if isinstance(content, dict) else content
    return [number for each in inside for number in _numbers(each)]


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"
