"""The memory that each rank has for gradients and optimizer state, in layout shard."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import nn
from torch.optim import SGD, Optimizer

from kaitian_mpi.balance.ownership import (
    BUCKET_CAPS,
    NO_MIRROR,
    Need,
    Pair,
    bucket_cap,
    with_mirrors,
    without_mirrors,
)
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.pending_parameter import is_compiled
from kaitian_mpi.distributed.sharded_model import can_be_sharded
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.topology import are_joined_by_library
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.train.measure.rank_timer import memory_limit
from kaitian_mpi.train.setup import Setup

_BUFFERS = 4  # of a bucket: its gradients, two that are being summed, and the heap's gaps
_UNSHARDED = 3  # sharded parameters gathered together: those that are whole, and two sums
_MIN_SHARDED_BYTES = 1 << 17  # smaller parameters stay whole on each rank
USUAL_STATES = 2  # of an optimizer, in parameters: Adam's moments
# The fraction of a rank's budget for its owned and mirrored parts; the rest is for activations. On
# a host also for moving the state after a loss: new parts exist before the old ones are freed.
_MAX_FRACTION, _MAX_FRACTION_ON_HOST = 0.75, 0.4
_ALIKE = 0.95  # a budget of at least this fraction of another one counts as equal to it


class MemoryBudget(NamedTuple):
    """The ranks' memory for the parts that they own, in bytes.

    That is for gradients, optimizer state, and parameters if these are sharded.
    """

    by_place: dict[str, float]
    """Each rank's budget."""
    need: Need
    sharded: frozenset[int] = frozenset()
    """The numbers of the sharded parameters; empty if all of them fit whole on each rank."""
    stepping: Mapping[str, float] = MappingProxyType({})
    """The bytes that an optimizer allocates while it steps, as a fraction of its rank's parts."""

    def owners(self, config: TrainingConfig, world: World) -> tuple[list[Pair], str]:
        """Return the owners and their mirrors, or the reason for no mirrors. Not collective.

        Raises:
            AgreedError: it does not fit, on all ranks.
        """
        needed = f"{self.need.owned / 1e6:.0f} MB"
        budgets = [self.by_place[info.place] for info in world.infos]
        # Equal devices get equal parts, which libraries exchange faster, in few pairs.
        ascending = sorted(budgets)
        budgets = [ascending[bisect_left(ascending, _ALIKE * budget)] for budget in budgets]
        if sum(budgets) < self.need.owned:
            available = ", ".join(f"{budget / 1e6:.0f}" for budget in budgets)
            beside = "" if self.sharded else "next to the model "
            raise AgreedError(
                f"--layout shard: {self._contents} take {needed}, but {beside}the ranks have "
                f"{available} MB of free memory; start more ranks, or use a smaller model or an "
                "optimizer with less state"
            )
        owners = without_mirrors(budgets)
        if sum(budget > 0 for budget in budgets) < 2:
            return owners, "as one rank has all"
        if not config.mirrors:
            return owners, "because of --no-mirrors"
        if not ulfm.is_enabled():
            return owners, "as fault tolerance is off"
        pairs = with_mirrors(budgets, [info.host for info in world.infos])
        for info, total, budget in zip(
            world.infos, self.total_bytes(pairs, world), budgets, strict=True
        ):
            if total > budget * (_MAX_FRACTION_ON_HOST if info.is_on_host else _MAX_FRACTION):
                return owners, f"as there is no memory for another {needed}"
        return pairs, ""

    def can_overlap(self, pairs: list[Pair], world: World) -> bool:
        """Return whether there is memory to receive values while a rank computes. Not collective.

        That is for all whole parameters at once, or for the next sharded one.
        """
        budgets = [self.by_place[info.place] for info in world.infos]
        return all(
            total + self.need.small <= _MAX_FRACTION * budget
            for total, budget in zip(self.total_bytes(pairs, world), budgets, strict=True)
        )

    def total_bytes(self, pairs: list[Pair], world: World) -> list[float]:
        """Return the bytes of each rank's owned and mirrored parts, with copies of the latter."""
        held = self.held(pairs, world)
        copied = self.copied(pairs, world)
        return [part + copy for part, copy in zip(held, copied, strict=True)]

    def held(self, pairs: list[Pair], world: World) -> list[float]:
        """Return the bytes of each rank's owned and mirrored parts."""
        held = [0.0] * world.size
        for owner, mirror, fraction in pairs:
            for rank in {owner, mirror} - {NO_MIRROR}:
                held[rank] += fraction * self.need.owned
        return held

    def copied(self, pairs: list[Pair], world: World) -> list[float]:
        """Return the bytes of the copies of each rank's mirrored parts, until a step's backward."""
        copied = [0.0] * world.size
        for _, mirror, fraction in pairs if are_joined_by_library(world.infos) else ():
            if mirror != NO_MIRROR:
                copied[mirror] += fraction * self.need.copied
        return copied

    def optimizer_bytes(self, config: TrainingConfig, world: World) -> list[float]:
        """Return the bytes that each rank's optimizer allocates while it steps."""
        pairs, _ = self.owners(config, world)
        fractions = [self.stepping.get(info.place, 0.0) for info in world.infos]
        held = self.held(pairs, world)
        return [fraction * part for fraction, part in zip(fractions, held, strict=True)]

    @property
    def _contents(self) -> str:
        return f"{'parameters, ' if self.sharded else ''}gradients and optimizer state"

    def describe_owners(self, owned: Sequence[float]) -> str:
        """Return a line with the fractions that ranks own."""
        shares = ", ".join(f"{fraction:.1%}" for fraction in owned)
        whole = f"{self.need.owned / 1e6:.3g} MB"
        return f"layout shard: {self._contents} by rank {shares} of {whole}"

    def describe(self, owned: list[float], mirrored: list[float], why: str) -> str:
        """Return a line with the fractions that ranks have, and `why` there are no mirrors."""
        line = self.describe_owners(owned)
        if len(owned) == 1:
            return line
        if why:
            return f"{line}; no mirrors, {why}"
        return line + "; mirrors " + ", ".join(f"{fraction:.1%}" for fraction in mirrored)


def find_memory_budget(
    setup: Setup, config: TrainingConfig, world: World
) -> tuple[MemoryBudget, int]:
    """Return the ranks' memory budget, and how many bytes of it this rank will use. Collective.

    Parameters are whole on each rank if they fit there, next to the rest, which is faster. The
    memory beyond a rank's part is for activations, so each rank keeps the same fraction for them.

    Raises:
        AgreedError: it does not fit.
    """
    with agree_on_errors(world.comm):
        optimizers = setup.task.make_optimizers(setup.task.model)
    model = setup.task.model
    used = memory_in_use(world)
    if not world.device_kind.is_host:
        used += sum(parameter.nbytes for parameter in model.parameters())
    budget = divide_memory(config, world, model, optimizers, used)
    pairs, _ = budget.owners(config, world)
    need = budget.need
    held = budget.held(pairs, world)[world.rank]
    copied = budget.copied(pairs, world)[world.rank]
    across = _bytes_across_groups(world)
    buffers = need.buffers + across + need.small * budget.can_overlap(pairs, world)
    # When ranks are timed, each has its values already.
    return budget, int(held * (1 - need.freed / need.owned) + copied) + buffers


def memory_in_use(world: World) -> int:
    """Return the bytes of this rank's device that are not free. Not collective."""
    device = world.device_kind
    index = world.device_index
    device.release_cached_memory()  # memory of earlier trials is free
    device.restart_memory_peak(index)
    return device.memory_peak_bytes(index)


def divide_memory(
    config: TrainingConfig,
    world: World,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    used: float,
    shards_parameters: bool = False,
) -> MemoryBudget:
    """Return the ranks' memory budget for a model. Collective.

    Args:
        config: the settings.
        world: all ranks.
        model: the model.
        optimizers: those that step it.
        used: the bytes of this rank's device that are used, by the whole model and what else there
            is.
        shards_parameters: whether to shard the parameters even if they fit whole on each rank.
    """
    needs, numbers = shard_needs(config, model, optimizers)
    limit = memory_limit(world)
    is_at_once = steps_at_once(optimizers, world.device_kind.is_host)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad) * is_at_once
    # While an optimizer steps, it may use the memory of activations.
    stepping = [trained / need.owned for need in needs]
    across = _bytes_across_groups(world)
    budgets = [
        (limit - max(0, used - need.freed) - need.buffers - across) / (1 + fraction)
        for need, fraction in zip(needs, stepping, strict=True)
    ]
    gathered = gather_values(world.comm, [budgets, stepping])
    whole_budgets = [rank_budgets[0] for rank_budgets, _ in gathered]
    fits = min(whole_budgets) >= 0 and sum(whole_budgets) >= needs[0].owned
    form = 0 if fits and not shards_parameters else len(needs) - 1
    return MemoryBudget(
        by_place={
            info.place: max(0.0, rank_budgets[form])
            for info, (rank_budgets, _) in zip(world.infos, gathered, strict=True)
        },
        need=needs[form],
        sharded=numbers if form else frozenset(),
        stepping={
            info.place: rank_stepping[form]
            for info, (_, rank_stepping) in zip(world.infos, gathered, strict=True)
        },
    )


def _bytes_across_groups(world: World) -> int:
    """Return the device memory for sums and gathers inside this rank's group, if there are more."""
    from kaitian_mpi.distributed.collectives.across_groups import ACROSS_BYTES

    return 0 if world.device_kind.is_host or len(world.groups) == 1 else ACROSS_BYTES


def shard_needs(
    config: TrainingConfig, model: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[list[Need], frozenset[int]]:
    """Return the memory needs with whole parameters, and with sharded ones if some can be.

    With the numbers of the parameters that can be sharded.
    """
    parameters = list(model.parameters())
    states = usual_states(optimizers)
    trained = [p.nbytes for p in parameters if p.requires_grad]
    bucket = max([1, min(sum(trained), BUCKET_CAPS[1]), *trained])
    small = sum(size for size in trained if size < BUCKET_CAPS[1])
    owned = sum(trained) * (1 + states)
    copied = sum(trained)
    needs = [Need(owned, bucket, _BUFFERS * bucket, small, copied=copied)]
    numbers = frozenset(
        number for number, parameter in enumerate(parameters) if is_worth_sharding(parameter)
    )
    if numbers and not config.spares:
        sharded_bytes = sum(parameters[number].nbytes for number in numbers)
        largest = max(p.nbytes for p in parameters)
        whole = [p.nbytes for n, p in enumerate(parameters) if p.requires_grad and n not in numbers]
        bucket = bucket_cap(largest, sharded_bytes)
        owned = owned + sharded_bytes
        ahead = max(largest, bucket)
        buffers = _UNSHARDED * ahead
        needs.append(Need(owned, bucket, buffers, ahead, freed=sharded_bytes, copied=sum(whole)))
    return needs, numbers


def possible_needs(
    config: TrainingConfig, model: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[Need, ...]:
    """Return the memory needs of a model; a compiled one cannot shard its parameters."""
    needs, _ = shard_needs(config, model, optimizers)
    return tuple(needs[:1] if any(map(is_compiled, model.modules())) else needs)


def is_worth_sharding(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is sharded if parameters do not fit whole on each rank."""
    return can_be_sharded(parameter) and parameter.nbytes >= _MIN_SHARDED_BYTES


def usual_states(optimizers: Sequence[Optimizer]) -> int:
    """Return about how many numbers optimizers keep for each number of a parameter."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    has_momentum = any(group.get("momentum") for group in groups)
    is_sgd = all(type(optimizer) is SGD for optimizer in optimizers)
    return int(has_momentum) if is_sgd else USUAL_STATES


def steps_at_once(optimizers: Sequence[Optimizer], is_host: bool) -> bool:
    """Return whether optimizers use torch's `foreach`: its default is the device's.

    AdamW then allocates as much as all parameters that it steps have.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if all(group.get("fused") for group in groups):
        return False
    foreach = [group.get("foreach") for group in groups]
    return any(not is_host if chosen is None else chosen for chosen in foreach)
