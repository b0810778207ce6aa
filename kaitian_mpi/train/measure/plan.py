"""The ranks' profiles, measured or remembered, and the batch sizes planned from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kaitian_mpi.balance.cost_model import RankCost, scores
from kaitian_mpi.balance.fastest_split import plan_fastest
from kaitian_mpi.balance.shares import plan_by_paper, plan_equal
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.measure.rank_benchmark import benchmark_ranks, write_benchmark
from kaitian_mpi.train.measure.rank_timer import RankMeasurement, equal_share
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.task import Computation, Task, aside

MakeTrialModel = Callable[[], AbstractContextManager[nn.Module]]

FROM_BENCHMARK = "the benchmark"


@dataclass(frozen=True)
class Plan:
    """The ranks' batch sizes, and this rank's micro-batches."""

    batch_sizes: list[int]
    scores: list[float]
    costs: list[RankCost] | None
    """Each rank's cost; None without a benchmark."""
    micro_batch_size: int | None
    """The most samples that this rank computes at once; None: no limit."""
    min_batch: int = 1
    """The fewest samples that a rank computes at once in training."""

    def describe(self, infos: Sequence[RankInfo]) -> dict[str, Any]:
        """Return the fields of `summary.json` on what a layout divides besides, if it does."""
        return {}


@dataclass(frozen=True)
class Profile:
    """One rank's cost, memory format and precision."""

    cost: RankCost | None
    memory_format: str
    precision: str


def profile_unmeasured(config: TrainingConfig, info: RankInfo) -> Profile:
    """Return the profile of a rank that was not measured."""
    # Convolutions were faster in channels_last on every CPU tried. An H200 gained little by it and
    # took 4 s to prepare each new batch size, in place of 0.1 s.
    fastest = "channels_last" if info.is_on_host else "contiguous"
    memory_format = config.memory_format.replace("auto", fastest)
    return Profile(None, memory_format, config.precision.replace("auto", "fp32"))


@dataclass(frozen=True)
class Profiles:
    """The profile of each rank by its place, the same on every rank."""

    by_place: Mapping[str, Profile]
    min_batch: int = 1
    """The fewest samples that the model can train on at once."""
    are_remembered: bool = False
    measured: Mapping[str, RankMeasurement] = field(default_factory=dict)
    """This job's benchmark results, by place; empty if there was no benchmark."""

    def costs(self, infos: Sequence[RankInfo]) -> list[RankCost] | None:
        """Return these ranks' costs; None if any was not measured."""
        costs = [self.by_place[info.place].cost for info in infos]
        measured = [cost for cost in costs if cost is not None]
        return measured if len(measured) == len(costs) else None

    def fit_errors(self, infos: Sequence[RankInfo]) -> list[float]:
        """Return the relative errors of these ranks' costs; 0 if this job did not measure it."""
        measured = [self.measured.get(info.place) for info in infos]
        return [
            0.0 if rank is None else max(rank.fit_error, rank.repeat_error or 0.0)
            for rank in measured
        ]

    def learn(self, world: World, costs: Mapping[str, RankCost]) -> Profiles:
        """Return these, updated with costs estimated while training; the same on all ranks.

        Collective.
        """
        rank_costs = {place: vars(cost) for place, cost in costs.items()}
        by_place = dict(self.by_place)
        for place, cost in next(filter(None, gather_values(world.comm, rank_costs)), {}).items():
            by_place[place] = replace(by_place[place], cost=RankCost(**cost))
        return replace(self, by_place=by_place)

    def plan(self, config: TrainingConfig, world: World) -> Plan:
        """Plan the batch sizes of these ranks. Collective."""
        with agree_on_errors(world.comm):
            profiles = [self.by_place[info.place] for info in world.infos]
            return make_plan(config, world, profiles, self.min_batch)

    def planned_bytes(
        self, infos: Sequence[RankInfo], shares: Sequence[int], stepping: Sequence[float] = ()
    ) -> list[int | None]:
        """Return the most bytes that each rank is to use; None if that was not measured.

        Args:
            infos: of the ranks.
            shares: their batch sizes.
            stepping: the bytes that their optimizers allocate while they step; empty: none.
        """
        planned: list[int | None] = []
        for info, share, step_bytes in zip(
            infos, shares, stepping or [0.0] * len(infos), strict=True
        ):
            result = self.measured.get(info.place)
            if result is None:
                planned.append(None)
                continue
            batch = min(share, result.largest_micro_batch or share)
            activations = result.memory_bytes_per_sample * batch
            planned.append(int(result.memory_bytes + max(activations, step_bytes)))
        return planned


def find_profiles(
    config: TrainingConfig,
    world: World,
    setup: Setup,
    earlier: Mapping[str, Profile],
    reserved: int | None = None,
    part: str = "",
) -> Profiles:
    """Return the ranks' profiles: an earlier job's, benchmarked, or unmeasured. Collective.

    Without a loss there is nothing to benchmark: then training itself shows what a step costs.

    Args:
        config: the run's.
        world: the ranks.
        setup: of the task.
        earlier: an earlier job's profiles, by place.
        reserved: the bytes of this rank that the training takes besides a step, if the model
            itself is timed; None: a copy of it is, with an optimizer of its own.
        part: what of the model is timed, if it is not all.
    """
    min_batch = find_min_batch(config, world, setup, copies=reserved is None)
    remembered = remembered_profiles(config, world, earlier, min_batch)
    if remembered is not None:
        return remembered
    if config.balance == "off" or setup.task.loss is None:
        return unmeasured_profiles(config, world, min_batch)
    results = benchmark_ranks(config, world, setup, min_batch, reserved, part)
    write_benchmark(world, setup, results)
    measured = {info.place: result for info, result in zip(world.infos, results, strict=True)}
    profiles = {
        place: Profile(result.cost, result.memory_format, result.precision)
        for place, result in measured.items()
    }
    return Profiles(profiles, min_batch, measured=measured)


def remembered_profiles(
    config: TrainingConfig, world: World, earlier: Mapping[str, Profile], min_batch: int
) -> Profiles | None:
    """Return an earlier job's profiles, if it had all of these ranks. Not collective."""
    places = [info.place for info in world.infos]
    # The profiles of an earlier job with `--balance off` have no costs.
    if all(p in earlier and (earlier[p].cost or config.balance == "off") for p in places):
        return Profiles(earlier, min_batch, are_remembered=True)
    return None


def unmeasured_profiles(config: TrainingConfig, world: World, min_batch: int) -> Profiles:
    """Return the profiles of ranks that were not measured. Not collective."""
    unmeasured = {info.place: profile_unmeasured(config, info) for info in world.infos}
    return Profiles(unmeasured, min_batch)


def make_plan(
    config: TrainingConfig, world: World, profiles: Sequence[Profile], min_batch: int = 1
) -> Plan:
    """Plan the batch sizes from the ranks' costs or scores; equal if any rank was not measured."""
    costs = [profile.cost for profile in profiles if profile.cost is not None]
    # With `--balance off` an earlier job of the run may have measured them.
    measured = len(costs) == len(profiles) and config.balance != "off"
    share = equal_share(config, world.size)
    by_rank = scores([c.seconds(share) for c in costs]) if measured else [1.0] * world.size
    batch = config.global_batch_size
    most = [c.largest_micro_batch for c in costs] if measured and config.sync_bn else None
    if config.batch_policy == "paper":
        shares = plan_by_paper(by_rank, config.batch_size, min_batch)
        if any(limit and share > limit for limit, share in zip(most or (), shares, strict=False)):
            raise UserError("--sync-bn: --batch-size does not fit the ranks' memory; lower it")
    elif measured:
        shares = plan_fastest(costs, batch, min_batch, most)
    else:
        shares = plan_equal(world.size, batch, min_batch)
    profile = profiles[world.rank]
    limit = (profile.cost and profile.cost.largest_micro_batch) or config.micro_batch_size or None
    return Plan(shares, by_rank, costs if measured else None, limit, min_batch)


def excluded_line(info: RankInfo, reason: str) -> str:
    """Return a line that says which rank is excluded, and why."""
    return f"{info} is excluded: {reason}; --keep-all keeps it"


def find_min_batch(config: TrainingConfig, world: World, setup: Setup, copies: bool = True) -> int:
    """Return the fewest samples that every rank can train the model on, 1 or 2. Collective.

    Batch norm over a single value per sample and channel raises for one sample, and similar layers
    return NaN. This is tested with the loss of the model, or if it `copies`, of a copy; if the task
    has no loss, a model with batch norm is taken for such.
    """
    precision = "fp32" if config.precision == "auto" else config.precision
    computation = Computation(world.device, precision, "contiguous")
    enter_phase("a trial of the model")
    copied = partial(copied_model, setup.task.model, world.device)
    make_model = copied if copies else setup.borrowed_model
    rank_minimum = min_batch_of(setup.task, setup.train, computation, make_model)
    enter_phase("waiting for the other ranks' trial of the model", waits=True, limited=False)
    minimum = max(gather_values(world.comm, rank_minimum))
    why = "the model cannot train on a single sample"
    if minimum > 1:
        print_rank_0(world, f"{why}: no rank takes fewer than {minimum}")
    if len(setup.train) < minimum:
        raise AgreedError(f"the data has {len(setup.train)} sample, but {why}; use more data")
    if 0 < config.micro_batch_size < minimum:
        raise AgreedError(f"--micro-batch-size must be at least {minimum}: {why}")
    return minimum


def min_batch_by_layers(model: nn.Module) -> int:
    """Return the fewest samples that a model is taken to train on: 2 with batch norm, else 1."""
    return 1 + any(isinstance(module, _BatchNorm) for module in model.modules())


def min_batch_of(
    task: Task, data: Any, computation: Computation, make_model: MakeTrialModel
) -> int:
    """Return the fewest samples that this rank can train the model on, 1 or 2.

    `make_model` makes a context with the model, or a copy of it, to compute with. Returns 1 for a
    model that fails with two samples as well: training will report its error.
    """
    if task.loss is None:
        return min_batch_by_layers(task.model)
    with aside(computation.device), torch.no_grad():
        if _works(task, data, [0], computation, make_model):
            return 1
        return 2 if _works(task, data, [0, len(data) - 1], computation, make_model) else 1


@contextmanager
def copied_model(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Compute with a copy of a model in the block."""
    yield copy.deepcopy(model).to(device).train()


def _works(
    task: Task,
    data: Any,
    indices: Sequence[int],
    computation: Computation,
    make_model: MakeTrialModel,
) -> bool:
    try:
        batch = data[indices]
        weight = task.weight_of(batch, len(indices))
        with make_model() as model:
            loss = computation.loss(task, model, computation.place(batch))
        # The mean of nothing is NaN, whatever the model. A device's errors show when it is read.
        return bool(loss.isfinite()) or not weight
    except Exception:  # user code may raise anything
        return False
