"""Compares the layouts of a job: what a step takes in each, and whether it fits the ranks' memory.

See docs/large-models.md for what the layouts are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kaitian_mpi.balance.communication import AllreduceCost, ddp_buckets, exposed_seconds
from kaitian_mpi.balance.cost_model import CostTable, RankCost
from kaitian_mpi.balance.pipeline import Hop
from kaitian_mpi.balance.pipeline_plan import Layer, PipelineJob, RankFacts, plan_pipeline
from kaitian_mpi.balance.shares import split_cohorts

REPLICATE, SHARD, PIPELINE = "replicate", "shard", "pipeline"
_AS_FAST = 1.03  # a layout that takes no longer than this times the fastest is as good
_SHARD_BUCKET, _LEAST_BUCKET = 8 << 20, 1 << 20
_BUCKETS = 4  # of a shard's that are in memory at once
_MOST = 1e18  # of what a file says, so that no sum overflows
_COPIES = 3  # of all gradients, in a shard's step: to buffers, from them, and to check them
_FORWARD = 1 / 3  # part of a step's compute time


@dataclass(frozen=True)
class LayoutRank:
    """What a rank takes to compute the whole model."""

    kind: str
    cost: RankCost
    """Of forward and backward; without a limit by memory."""
    memory_bytes: float
    """That it has for parameters, state and activations."""
    update_sec_per_byte: float = 0.0
    """The optimizer's, by bytes of parameters."""
    copy_sec_per_byte: float = 0.0
    """To copy what is not in a cache."""


@dataclass(frozen=True)
class LayoutJob:
    """What the layouts are compared by."""

    ranks: tuple[LayoutRank, ...]
    parameter_bytes: int
    trained_bytes: int
    """Of the parameters that are trained."""
    state_bytes: int
    """Of their gradients and the optimizer's state."""
    kept_bytes: float
    """Of the activations of a sample."""
    largest_bytes: int
    """Of the largest parameter."""
    global_batch: int
    min_batch: int
    allreduce_cost: AllreduceCost
    scatter_cost: AllreduceCost
    """Of a sum in parts, by the bytes of the whole."""
    gather_cost: AllreduceCost
    """Of bringing all parts to all ranks, by the bytes of the whole."""
    on_host: bool = False
    """Whether a rank computes on its host: then what travels takes the cores that compute, and the
    model is beside its copy in the benchmark of replicate."""
    pipeline: PipelineJob | None = None
    """None: the model cannot be divided in layers."""
    no_pipeline: str = ""
    """Why not."""

    @property
    def memory(self) -> np.ndarray:
        """The bytes that each rank has."""
        return np.array([rank.memory_bytes for rank in self.ranks])

    def seconds(self, updates: float | np.ndarray, copies: float) -> np.ndarray:
        """Return each rank's seconds to update some bytes of parameters, and to copy others."""
        return updates * np.array([rank.update_sec_per_byte for rank in self.ranks]) + (
            copies * np.array([rank.copy_sec_per_byte for rank in self.ranks])
        )

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        content = asdict(self)
        if self.pipeline is not None:
            links = [[*kinds, *hop] for kinds, hop in self.pipeline.links.items()]
            content["pipeline"]["links"] = links
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> LayoutJob:
        """Return the job of a file.

        Raises:
            ValueError, TypeError, KeyError: it is not valid.
        """
        found = dict(content)
        found["ranks"] = tuple(
            LayoutRank(**{**rank, "cost": RankCost(**rank["cost"])}) for rank in content["ranks"]
        )
        for name in ("allreduce_cost", "scatter_cost", "gather_cost"):
            found[name] = AllreduceCost(**content[name])
        if (pipeline := content["pipeline"]) is not None:
            tuples = ("fixed_sec", "sample_sec")
            ranks = [{**r, **{name: tuple(r[name]) for name in tuples}} for r in pipeline["ranks"]]
            found["pipeline"] = PipelineJob(
                **{
                    **pipeline,
                    "layers": tuple(Layer(**layer) for layer in pipeline["layers"]),
                    "ranks": tuple(RankFacts(**rank) for rank in ranks),
                    "links": {(one, two): Hop(*link) for one, two, *link in pipeline["links"]},
                }
            )
        job = cls(**found)
        numbers = _numbers(content)
        if not job.ranks or not all(0 <= number <= _MOST for number in numbers):  # False for NaN
            raise ValueError("a number of the layouts is out of range")
        return job

    def in_world(
        self, world: Mapping[str, int], global_batch: int, allreduce: AllreduceCost
    ) -> LayoutJob:
        """Return the job of a world with so many ranks of each kind, like those measured in turn.

        The parts of an allreduce are scaled as the whole.
        """
        by_kind: dict[str, list[int]] = {}
        for number, rank in enumerate(self.ranks):
            by_kind.setdefault(rank.kind, []).append(number)
        chosen = [
            number
            for kind, count in world.items()
            for number in itertools.islice(itertools.cycle(by_kind[kind]), count)
        ]
        then = self.allreduce_cost.seconds(_SHARD_BUCKET)
        longer = allreduce.seconds(_SHARD_BUCKET) / then if then else 1.0

        def scaled(cost: AllreduceCost) -> AllreduceCost:
            if not then:  # one rank was measured; each is half of an allreduce
                return AllreduceCost(allreduce.latency_sec / 2, allreduce.sec_per_byte / 2)
            return AllreduceCost(cost.latency_sec * longer, cost.sec_per_byte * longer)

        pipeline = self.pipeline
        if pipeline is not None:
            ranks = tuple(pipeline.ranks[number] for number in chosen)
            pipeline = replace(pipeline, ranks=ranks, global_batch=global_batch)
        return replace(
            self,
            ranks=tuple(self.ranks[number] for number in chosen),
            global_batch=global_batch,
            allreduce_cost=allreduce,
            scatter_cost=scaled(self.scatter_cost),
            gather_cost=scaled(self.gather_cost),
            pipeline=pipeline,
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
    return [_replicate(job), _shard(job), _pipeline(job)]


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
        memory = " to ".join(
            f"{size:,}" for size in dict.fromkeys([sizes[0], sizes[-1]] if sizes else [])
        )
        seconds = f"{1e3 * each.step_sec:,.1f}" if each.step_sec else "-"
        rows.append([each.layout, seconds, memory or "-", each.why])
    return rows


def _replicate(job: LayoutJob) -> Prediction:
    whole = job.parameter_bytes * (1 + job.on_host) + job.state_bytes
    fixed = np.full(len(job.ranks), float(whole))
    found = _divide(job, REPLICATE, fixed, job.seconds(job.trained_bytes, 0))
    if isinstance(found, Prediction):
        return found
    exposed = exposed_seconds(
        found.computing, ddp_buckets(job.trained_bytes), job.allreduce_cost, found.rounds
    )
    return Prediction(REPLICATE, found.seconds + exposed, found.needed)


def _shard(job: LayoutJob) -> Prediction:
    bucket = max(min(job.trained_bytes, _SHARD_BUCKET), job.largest_bytes)
    least = job.min_batch * job.kept_bytes
    in_parts = max(job.largest_bytes, _LEAST_BUCKET)
    for fixed, owned_bytes in (
        (job.parameter_bytes + _BUCKETS * bucket, job.state_bytes),
        (_BUCKETS * in_parts, job.parameter_bytes + job.state_bytes),
    ):
        room = np.maximum(0.0, job.memory - fixed - least)
        if room.sum() >= owned_bytes:
            break
    else:
        needed = owned_bytes + len(job.ranks) * (fixed + least)
        why = f"needs {_mb(needed)} in all, and the ranks have {_mb(job.memory.sum())}"
        return Prediction(SHARD, why=why)
    part = room / room.sum()
    update = job.seconds(job.trained_bytes * part, _COPIES * job.trained_bytes)
    found = _divide(job, SHARD, fixed + part * owned_bytes, update)
    if isinstance(found, Prediction):
        return found
    is_parted, rounds = owned_bytes != job.state_bytes, found.rounds
    of_round = found.computing / rounds
    sizes = _buckets(job.trained_bytes, bucket)
    step = found.seconds + rounds * exposed_seconds(of_round, sizes, job.scatter_cost)
    moved = job.parameter_bytes if is_parted else job.trained_bytes
    gathered = sum(map(job.gather_cost.seconds, _buckets(moved, bucket)))
    if is_parted:  # for each forward and each backward
        step += 2 * rounds * gathered
    else:
        step += max(0.0, gathered - _FORWARD * of_round * (not job.on_host))
    return Prediction(SHARD, step, found.needed, "parameters in parts, too" if is_parted else "")


def _pipeline(job: LayoutJob) -> Prediction:
    if job.pipeline is None:
        return Prediction(PIPELINE, why=job.no_pipeline)
    plan = plan_pipeline(job.pipeline)
    if plan is None:
        return Prediction(PIPELINE, why="no division of the layers fits the ranks' memory")
    samples = f"micro-batches of {plan.micro_batch}"
    return Prediction(
        PIPELINE, plan.step_sec, plan.bytes_by_rank, f"{len(plan.stages)} stages, {samples}"
    )


class _Division(NamedTuple):
    """The fastest shares, and what they take."""

    seconds: float
    """Of the slowest rank, with its optimizer."""
    computing: float
    """Without."""
    rounds: int
    """The most micro-batches of a rank."""
    needed: tuple[int, ...]
    """Each rank's memory, at least."""


def _divide(
    job: LayoutJob, layout: str, fixed: np.ndarray, update: np.ndarray
) -> _Division | Prediction:
    """Divide the global batch over ranks that have other bytes and seconds in each step, too."""
    ranks, least = len(job.ranks), job.min_batch * job.kept_bytes
    if job.global_batch < job.min_batch * ranks:
        why = f"a global batch of {job.global_batch} is too small for {ranks} ranks"
        return Prediction(layout, why=why)
    needed = fixed + least
    missing = needed - job.memory
    if (missing > 0).any():
        rank = int(missing.argmax())
        has = _mb(job.memory[rank])
        return Prediction(layout, why=f"needs {_mb(needed[rank])} on rank {rank}, which has {has}")
    table = CostTable.of([rank.cost for rank in job.ranks])
    room = np.floor((job.memory - fixed) / max(job.kept_bytes, 1.0))
    table = replace(table, largest_micro_batch=np.maximum(room, job.min_batch))
    whole = replace(table, alpha_sec=table.alpha_sec + update)
    samples, fewer = split_cohorts(whole, np.ones(ranks, int), job.global_batch, job.min_batch)
    shares = samples - fewer
    computing = table.seconds(shares)
    rounds = int(np.ceil(shares / table.largest_micro_batch).max())
    seconds = float((computing + update).max())
    return _Division(seconds, float(computing.max()), rounds, tuple(map(int, needed)))


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
