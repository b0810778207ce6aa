"""Compares the layouts of a job: the time of a step in each, and whether it fits in memory.

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
from kaitian_mpi.balance.expert_plan import place_experts
from kaitian_mpi.balance.experts import ExpertsJob
from kaitian_mpi.balance.fastest_split import split_cohorts
from kaitian_mpi.balance.ownership import BUCKET_CAPS, Need
from kaitian_mpi.balance.pipeline_cost import Layer, LayerFacts, PipelineJob
from kaitian_mpi.balance.pipeline_plan import plan_pipeline
from kaitian_mpi.errors import UserError

REPLICATE = "replicate"
SHARD = "shard"
PIPELINE = "pipeline"
EXPERTS = "experts"
_AS_FAST = 1.03  # layouts within this factor of the fastest count as equally fast
_MOST = 1e18  # largest number accepted from a file, so that no sum overflows
_MOST_RANKS = 256  # for which the places of experts are predicted: each pair of ranks counts
_FORWARD = 1 / 3  # part of a step's compute time


@dataclass(frozen=True)
class LayoutJob:
    """The measurements that the layouts are compared by."""

    chain: PipelineJob
    """The ranks and the model's layers; a single layer if the model cannot be divided."""
    whole: Layer
    """The whole model as one layer."""
    needs: tuple[Need, ...]
    """The memory of each form of shard: gradients and optimizer state sharded and, if the model
    permits it, parameters as well."""
    allreduce_cost: AllreduceCost
    scatter_cost: AllreduceCost
    """The cost of a reduce-scatter, by the bytes of the full tensor."""
    gather_cost: AllreduceCost
    """The cost of an all-gather, by the bytes of the full tensor."""
    on_host: bool = False
    """Whether a rank computes on its host's CPU: communication then takes cores from computing."""
    has_mirrors: bool = False
    """Whether two ranks step each part of a sharded parameter."""
    experts: ExpertsJob | None = None
    """The model's experts, and its other costs without them; None if it has none."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """By layout, the reason why the task or the settings rule it out."""

    @property
    def memory_bytes(self) -> np.ndarray:
        """The bytes of memory that each rank may use."""
        return np.array([rank.memory_bytes for rank in self.chain.ranks])

    @property
    def base_bytes(self) -> np.ndarray:
        """The bytes that each rank uses beyond parameters, state and activations."""
        return np.array([rank.base_bytes for rank in self.chain.ranks])

    @property
    def copies(self) -> np.ndarray:
        """How often each rank has the model in replicate.

        Twice on a host, whose memory also holds the copy that is benchmarked.
        """
        return np.array([1 + rank.is_on_host for rank in self.chain.ranks])

    @property
    def min_activation_bytes(self) -> float:
        """The bytes of the activations of the smallest micro-batch."""
        return self.chain.min_batch * self.sample_bytes

    @property
    def sample_bytes(self) -> float:
        """The bytes of a sample's activations, and of temporaries while these are computed."""
        return self.whole.kept_bytes + self.whole.temporary_bytes

    def optimizer_bytes(self, fraction: np.ndarray) -> np.ndarray:
        """Return the temporary bytes of each rank's optimizer to step this fraction at once."""
        at_once = np.array([rank.steps_at_once for rank in self.chain.ranks])
        return fraction * self.whole.trained_bytes * at_once

    def update_sec(self, fractions: np.ndarray) -> np.ndarray:
        """Return each rank's seconds to step its fraction of the parameters."""
        count = self.whole.trained
        size = self.whole.trained_bytes
        # A rank has some rows of most large parameters, and few of the small parameters.
        seconds = [
            rank.update_seconds(fraction**0.5 * count, fraction * size)
            for rank, fraction in zip(self.chain.ranks, fractions.tolist(), strict=True)
        ]
        return np.array(seconds)

    def handling_sec(self, layout: str) -> np.ndarray:
        """Return each rank's seconds per step for all but computing and the optimizer."""
        count = self.whole.trained
        size = self.whole.trained_bytes
        return np.array([rank.handling_seconds(layout, count, size) for rank in self.chain.ranks])

    def check(self) -> None:
        """Check the numbers read from a file.

        Raises:
            ValueError: they permit no prediction.
        """
        ranks = self.chain.ranks
        numbers = _numbers(asdict(self))
        is_timed = bool(ranks) and all(sum(rank.sample_sec) > 0 for rank in ranks)
        if not is_timed or not all(0 <= number <= _MOST for number in numbers):  # False for NaN
            raise ValueError("a number of the layouts is out of range")

    def in_world(
        self, world: Mapping[str, int], global_batch: int, allreduce: AllreduceCost
    ) -> LayoutJob:
        """Return the job for a world with other numbers of ranks, repeating the measured ranks.

        `world` is the number of ranks of each kind. The cost of reduce-scatter and all-gather is
        scaled by the same factor as that of allreduce.
        """
        by_kind: dict[str, list[LayerFacts]] = {}
        for rank in self.chain.ranks:
            by_kind.setdefault(rank.kind, []).append(rank)
        ranks = tuple(
            rank
            for kind, count in world.items()
            for rank in itertools.islice(itertools.cycle(by_kind[kind]), count)
        )
        measured_sec = self.allreduce_cost.seconds(BUCKET_CAPS[1])
        slowdown = allreduce.seconds(BUCKET_CAPS[1]) / measured_sec if measured_sec else 1.0

        def scaled(cost: AllreduceCost) -> AllreduceCost:
            if not measured_sec:  # one rank was measured; take half of an allreduce
                return AllreduceCost(allreduce.latency_sec / 2, allreduce.sec_per_byte / 2)
            return AllreduceCost(cost.latency_sec * slowdown, cost.sec_per_byte * slowdown)

        return replace(
            self,
            chain=replace(self.chain, ranks=ranks, global_batch=global_batch),
            experts=self.experts and self.experts.in_world(world, global_batch),
            allreduce_cost=allreduce,
            scatter_cost=scaled(self.scatter_cost),
            gather_cost=scaled(self.gather_cost),
        )


@dataclass(frozen=True)
class Prediction:
    """The predicted step time and memory of a layout, or the reason why it is impossible."""

    layout: str
    step_sec: float | None = None
    """None if it is impossible."""
    bytes_by_rank: tuple[int, ...] = ()
    """The least memory of each rank: with the smallest micro-batches."""
    why: str = ""
    """The reason if it is impossible; otherwise a remark, or nothing."""


def predict_layouts(job: LayoutJob) -> list[Prediction]:
    """Return the predictions for replicate, shard and pipeline, in this order.

    And for experts, if the model has some.
    """
    predict = {REPLICATE: _replicate, SHARD: _shard, PIPELINE: _pipeline}
    if job.experts is not None or EXPERTS in job.refused:
        predict[EXPERTS] = _experts
    predictions = []
    for layout, predict_layout in predict.items():
        if layout in job.refused:
            predictions.append(Prediction(layout, why=job.refused[layout]))
        else:
            predictions.append(predict_layout(job))
    return predictions


def choose(predictions: Sequence[Prediction]) -> Prediction | None:
    """Return the fastest possible layout, or None if none is possible.

    The first of about equally fast ones is chosen, because it is the simplest: in replicate, each
    rank can continue without any other.
    """
    fastest_sec = min((p.step_sec for p in predictions if p.step_sec), default=0.0)
    for prediction in predictions:
        if prediction.step_sec and prediction.step_sec <= _AS_FAST * fastest_sec:
            return prediction
    return None


def prediction_table(predictions: Sequence[Prediction]) -> list[list[str]]:
    """Return the rows of a table; the first row names the columns."""
    rows = [["layout", "ms per step", "least MB per rank", ""]]
    for prediction in predictions:
        sizes = [round(size / 1e6) for size in prediction.bytes_by_rank]
        memory = "-"
        if sizes:
            memory = f"{min(sizes):,}"
            if max(sizes) > min(sizes):
                memory += f" to {max(sizes):,}"
        seconds = f"{1e3 * prediction.step_sec:,.1f}" if prediction.step_sec else "-"
        rows.append([prediction.layout, seconds, memory, prediction.why])
    return rows


def _replicate(job: LayoutJob) -> Prediction:
    whole = job.whole
    size = whole.weight_bytes * job.copies + whole.state_bytes + whole.cast_bytes
    # A rank starts its next step once it has the sums, so its optimizer counts with its computing.
    everything = np.ones(len(job.chain.ranks))
    other_sec = job.handling_sec(REPLICATE) + job.update_sec(everything)
    optimizer_bytes = job.optimizer_bytes(everything)
    division = _divide(job, REPLICATE, job.base_bytes + size, optimizer_bytes, other_sec)
    if isinstance(division, Prediction):
        return division
    compute_sec = float(division.compute_sec.max())
    rounds = int(division.rounds.max())
    buckets = ddp_buckets(whole.trained_bytes)
    exposed = exposed_seconds(compute_sec, buckets, job.allreduce_cost, rounds)
    step = float((division.compute_sec + other_sec).max()) + exposed
    return Prediction(REPLICATE, step, division.needed_bytes)


class ShardDivision(NamedTuple):
    """The division of layout shard into what ranks own, by their free memory."""

    need: Need
    fixed_bytes: np.ndarray
    """By rank, the bytes that are not divided."""
    fractions: np.ndarray
    """Each rank's fraction of `need.owned`."""
    why: str = ""
    """The reason if it does not fit."""


def divide_shard(job: LayoutJob) -> ShardDivision:
    """Return the first form of shard that fits the ranks' memory; the last one if none does."""
    whole = job.whole
    for need in job.needs:
        fixed = job.base_bytes + whole.weight_bytes - need.freed + need.buffers
        if not need.freed:  # otherwise a cast lives no longer than the gathered parameter
            fixed = fixed + whole.cast_bytes
        free = job.memory_bytes - fixed
        # Activations and the optimizer's temporary memory are never held at the same time.
        optimizer_ratio = job.optimizer_bytes(np.ones(len(free))) / max(need.owned, 1)
        budget = np.minimum(free - job.min_activation_bytes, free / (1 + optimizer_ratio))
        budget = np.maximum(0.0, budget)
        fractions = budget / max(budget.sum(), 1.0)
        if budget.sum() >= need.owned:
            return ShardDivision(need, fixed, fractions)
    needed = need.owned + (fixed + job.min_activation_bytes).sum()
    why = f"needs {_mb(needed)} in total; the ranks have {_mb(job.memory_bytes.sum())}"
    return ShardDivision(need, fixed, fractions, why)


def _shard(job: LayoutJob) -> Prediction:
    whole = job.whole
    need, fixed, fractions, why = divide_shard(job)
    if why:
        return Prediction(SHARD, why=why)
    handling = job.handling_sec(SHARD)
    held = fixed + fractions * need.owned
    division = _divide(job, SHARD, held, job.optimizer_bytes(fractions), handling)
    if isinstance(division, Prediction):
        return division
    # About half of the work on gradients is done for each micro-batch.
    busy_sec = division.compute_sec + handling * (1 + division.rounds) / 2
    step = _seconds_in_rounds(busy_sec, division.rounds)
    rounds = int(division.rounds.max())
    round_sec = float((division.compute_sec / division.rounds).max())
    buckets = _buckets(whole.trained_bytes, need.bucket)
    step += rounds * exposed_seconds(round_sec, buckets, job.scatter_cost)
    # All ranks wait for the sums, and then for the values of all owners.
    step += float(job.update_sec(fractions).max()) * (1 + job.has_mirrors)
    moved = whole.weight_bytes if need.freed else whole.trained_bytes
    gather_sec = sum(map(job.gather_cost.seconds, _buckets(moved, need.bucket)))
    if need.freed:  # gathered for each forward and each backward
        step += 2 * rounds * gather_sec
    else:
        step += max(0.0, gather_sec - _FORWARD * round_sec * (not job.on_host))
    remark = "parameters sharded, too" if need.freed else ""
    return Prediction(SHARD, step, division.needed_bytes, remark)


def _pipeline(job: LayoutJob) -> Prediction:
    plan = plan_pipeline(job.chain)
    if plan is None:
        return Prediction(PIPELINE, why="no division of the layers fits the ranks' memory")
    stages = f"{len(plan.stages)} stage{'s' * (len(plan.stages) > 1)}"
    remark = f"{stages}, micro-batches of {plan.micro_batch}"
    return Prediction(PIPELINE, plan.step_sec, plan.bytes_by_rank, remark)


def _experts(job: LayoutJob) -> Prediction:
    assert job.experts is not None
    if len(job.experts.ranks) > _MOST_RANKS:
        return Prediction(EXPERTS, why=f"not predicted for more than {_MOST_RANKS} ranks")
    try:
        placement = place_experts(job.experts)
    except UserError:
        return Prediction(EXPERTS, why="no division of the experts fits the ranks' memory")
    # All else is as in replicate.
    size = job.whole.trained_bytes
    dense_bytes = max(0, size - sum(expert.trained_bytes for expert in job.experts.experts))
    fraction = np.full(len(job.chain.ranks), dense_bytes / max(1, size))
    other_sec = float((job.handling_sec(REPLICATE) + job.update_sec(fraction)).max())
    buckets = ddp_buckets(dense_bytes)
    step = placement.step_sec + other_sec
    step += exposed_seconds(placement.step_sec, buckets, job.allreduce_cost, placement.rounds)
    pairs = zip(job.experts.ranks, placement.bytes_by_rank, strict=True)
    needed = tuple(int(rank.base_bytes + held) for rank, held in pairs)
    held = [len(placement.experts_of(rank)) for rank in range(len(needed))]
    remark = f"{min(held)} to {max(held)} experts on a rank"
    return Prediction(EXPERTS, step, needed, remark)


class _Division(NamedTuple):
    """The time and memory of the fastest division of the global batch."""

    compute_sec: np.ndarray
    """Each rank's seconds of computing per step."""
    rounds: np.ndarray
    """Each rank's number of micro-batches."""
    needed_bytes: tuple[int, ...]
    """The least memory of each rank."""


def _divide(
    job: LayoutJob,
    layout: str,
    fixed_bytes: np.ndarray,
    optimizer_bytes: np.ndarray,
    other_sec: np.ndarray,
) -> _Division | Prediction:
    """Divide the global batch so that the slowest rank finishes first.

    Each array has one entry per rank. `optimizer_bytes` are temporary: they are not needed while
    there are activations. `other_sec` are the seconds per step beyond computing.
    """
    chain = job.chain
    ranks = len(chain.ranks)
    if chain.global_batch < chain.min_batch * ranks:
        why = f"a global batch of {chain.global_batch} is too small for {ranks} ranks"
        return Prediction(layout, why=why)
    needed = fixed_bytes + np.maximum(job.min_activation_bytes, optimizer_bytes)
    missing = needed - job.memory_bytes
    if (missing >= 1).any():  # a fraction of a byte may be rounding
        rank = int(missing.argmax())
        has = _mb(job.memory_bytes[rank])
        return Prediction(layout, why=f"needs {_mb(needed[rank])} on rank {rank}, which has {has}")
    table = CostTable.from_costs(
        [RankCost(sum(rank.fixed_sec), sum(rank.sample_sec)) for rank in chain.ranks]
    )
    fitting = np.floor((job.memory_bytes - fixed_bytes) / max(job.sample_bytes, 1.0))
    fitting = np.minimum(fitting, chain.micro_batch or chain.global_batch)
    table = replace(table, largest_micro_batch=np.maximum(fitting, chain.min_batch))
    loaded = replace(table, alpha_sec=table.alpha_sec + other_sec)
    samples, fewer = split_cohorts(loaded, np.ones(ranks, int), chain.global_batch, chain.min_batch)
    shares = samples - fewer
    rounds = np.ceil(shares / table.largest_micro_batch)
    return _Division(table.seconds(shares), rounds, tuple(map(int, needed)))


def _seconds_in_rounds(seconds: np.ndarray, rounds: np.ndarray) -> float:
    """Return the seconds of ranks that wait for each other after every micro-batch."""
    total = done = 0.0
    for count in np.unique(rounds).tolist():
        total += (count - done) * float((seconds / rounds)[rounds >= count].max())
        done = count
    return total


def _buckets(total: int, bucket: int) -> list[int]:
    full, remainder = divmod(total, bucket)
    return [bucket] * full + [remainder] * (remainder > 0)


def _numbers(content: Any) -> list[float]:
    """Return all numbers in the parsed content of a file."""
    if isinstance(content, bool) or content is None or isinstance(content, str):
        return []
    if isinstance(content, int | float):
        return [content]
    items = content.values() if isinstance(content, dict) else content
    return [number for item in items for number in _numbers(item)]


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"
