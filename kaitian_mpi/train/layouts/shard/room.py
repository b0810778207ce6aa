"""How much memory each rank has for gradients and optimizer state, in layout shard."""

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
from kaitian_mpi.distributed.late_values import can_be_parted
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.topology import are_joined_by_library
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.train.measure.rank_timer import memory_limit
from kaitian_mpi.train.setup import Setup

_BUFFERS = 4  # of a bucket: its gradients, two that are being summed, and the heap's gaps
_VISITS = 4  # parameters in parts: one that is whole, its gradient, two that are being summed
_MIN_PARTED_BYTES = 1 << 17  # smaller parameters stay whole on each rank
_USUAL_STATES = 2  # of an optimizer, in parameters: Adam's moments
# What mirrors may take of a rank's room, with what it owns; the rest is for activations. On a host
# also for moving the state after a loss: the new parts are there before the old ones are freed.
_MOST, _MOST_ON_HOST = 0.75, 0.4
_ALIKE = 0.95  # of another rank's room is as much as that


class Room(NamedTuple):
    """The memory for what ranks own, in bytes: gradients, optimizer state, perhaps parameters."""

    by_place: dict[str, float]
    """What each rank has."""
    need: Need
    parted: frozenset[int] = frozenset()
    """The numbers of the parameters that are owned in parts; empty if they fit whole on each."""
    stepping: Mapping[str, float] = MappingProxyType({})
    """What each rank's optimizer allocates while it steps, in parts of what the rank owns."""

    def owners(self, config: TrainingConfig, world: World) -> tuple[list[Pair], str]:
        """Return who owns what, and its mirrors; or else why there are none. Not collective.

        Raises:
            AgreedError: it does not fit, on all ranks.
        """
        needed = f"{self.need.owned / 1e6:.0f} MB"
        given = sorted(rooms := [self.by_place[info.place] for info in world.infos])
        # Equal devices get equal parts, which libraries exchange faster, in few pairs.
        rooms = [given[bisect_left(given, _ALIKE * room)] for room in rooms]
        if sum(rooms) < self.need.owned:
            has = ", ".join(f"{each / 1e6:.0f}" for each in rooms)
            beside = "" if self.parted else "next to the model "
            raise AgreedError(
                f"--layout shard: {self._what} take {needed}, but {beside}the "
                f"ranks have room for {has} MB; start more ranks, or use a smaller model or an "
                "optimizer with less state"
            )
        alone = without_mirrors(rooms)
        if sum(room > 0 for room in rooms) < 2:
            return alone, "as one rank has all"
        if not config.mirrors:
            return alone, "as --no-mirrors asks"
        if not ulfm.is_enabled():
            return alone, "as fault tolerance is off"
        pairs = with_mirrors(rooms, [info.host for info in world.infos])
        taken = self.taken(pairs, world)
        most = [_MOST_ON_HOST if info.is_on_host else _MOST for info in world.infos]
        if any(own > part * room for own, part, room in zip(taken, most, rooms, strict=True)):
            return alone, f"as there is no room for another {needed}"
        return pairs, ""

    def can_overlap(self, pairs: list[Pair], world: World) -> bool:
        """Return whether there is memory to receive values while a rank computes. Not collective.

        All of them at once, or of parameters in parts the next one.
        """
        rooms = [self.by_place[info.place] for info in world.infos]
        taken = self.taken(pairs, world)
        return all(
            own + self.need.small <= _MOST * room for own, room in zip(taken, rooms, strict=True)
        )

    def taken(self, pairs: list[Pair], world: World) -> list[float]:
        """Return the bytes that each rank will have of what is owned, with its mirrors' copies."""
        copied = self.copied(pairs, world)
        return [own + copy for own, copy in zip(self.held(pairs, world), copied, strict=True)]

    def held(self, pairs: list[Pair], world: World) -> list[float]:
        """Return the bytes of gradients and optimizer state that each rank will have."""
        held = [0.0] * world.size
        for owner, mirror, fraction in pairs:
            for rank in {owner, mirror} - {NO_MIRROR}:
                held[rank] += fraction * self.need.owned
        return held

    def copied(self, pairs: list[Pair], world: World) -> list[float]:
        """Return the bytes that each rank copies of what it mirrors, until a step's backward."""
        copied = [0.0] * world.size
        for _, mirror, fraction in pairs if are_joined_by_library(world.infos) else ():
            if mirror != NO_MIRROR:
                copied[mirror] += fraction * self.need.copied
        return copied

    def bytes_of_steps(self, config: TrainingConfig, world: World) -> list[float]:
        """Return the bytes that each rank's optimizer allocates while it steps."""
        held = self.held(self.owners(config, world)[0], world)
        parts = [self.stepping.get(info.place, 0.0) for info in world.infos]
        return [part * own for part, own in zip(parts, held, strict=True)]

    @property
    def _what(self) -> str:
        return f"{'parameters, ' if self.parted else ''}gradients and optimizer state"

    def describe(self, owned: list[float], mirrored: list[float], why: str) -> str:
        """Return a line that says which fractions ranks have, or `why` there are no mirrors."""
        shares = ", ".join(f"{each:.1%}" for each in owned)
        whole = f"{self.need.owned / 1e6:.3g} MB"
        line = f"layout shard: {self._what} by rank {shares} of {whole}"
        if len(owned) == 1:
            return line
        if why:
            return f"{line}; no mirrors, {why}"
        return line + "; mirrors " + ", ".join(f"{each:.1%}" for each in mirrored)


def find_room(setup: Setup, config: TrainingConfig, world: World) -> tuple[Room, int]:
    """Return the memory for what ranks own, and how many bytes of it this one will use.

    Parameters are whole on each rank if they fit there, next to the rest, which is faster. What a
    rank has left beyond its part is for the activations, so each keeps the same fraction for them.
    Collective.

    Raises:
        AgreedError: it does not fit.
    """
    with agree_on_errors(world.comm):
        optimizers = setup.task.make_optimizers(setup.task.model)
    device, index = world.device_kind, world.device_index
    device.release_cached_memory()  # what earlier trials have used is free
    device.restart_memory_peak(index)
    used = device.memory_peak_bytes(index)
    limit = memory_limit(world)
    needs, numbers = shard_needs(config, setup.task.model, optimizers)
    model = 0 if device.is_host else sum(each.nbytes for each in setup.task.model.parameters())
    is_at_once = steps_at_once(optimizers, device.is_host)
    trained = sum(p.nbytes for p in setup.task.model.parameters() if p.requires_grad) * is_at_once
    # While an optimizer steps, no activations need what is left beside what a rank owns.
    stepping = [trained / each.owned for each in needs]
    across = _bytes_across_groups(world)
    own = [
        (limit - max(0, used + model - each.freed) - each.buffers - across) / (1 + part)
        for each, part in zip(needs, stepping, strict=True)
    ]
    rooms, steppings = (
        [*zip(*columns, strict=True)]
        for columns in zip(*gather_values(world.comm, [own, stepping]), strict=True)
    )
    fits = min(rooms[0]) >= 0 and sum(rooms[0]) >= needs[0].owned
    form = 0 if fits else len(needs) - 1
    need, by_rank = needs[form], [max(0.0, each) for each in rooms[form]]
    places = [info.place for info in world.infos]
    by_place, parts = (
        dict(zip(places, values, strict=True)) for values in (by_rank, steppings[form])
    )
    room = Room(by_place, need, numbers if form else frozenset(), parts)
    pairs, _ = room.owners(config, world)
    held, copied = (own(pairs, world)[world.rank] for own in (room.held, room.copied))
    buffers = need.buffers + across + need.small * room.can_overlap(pairs, world)
    # When ranks are timed, each has its values already.
    return room, int(held * (1 - need.freed / need.owned) + copied) + buffers


def _bytes_across_groups(world: World) -> int:
    """Return the device memory for sums and gathers inside this rank's group, if there are more."""
    from kaitian_mpi.distributed.collectives.across_groups import ACROSS_BYTES

    return 0 if world.device_kind.is_host or len(world.groups) == 1 else ACROSS_BYTES


def shard_needs(
    config: TrainingConfig, model: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[list[Need], frozenset[int]]:
    """Return what whole parameters take, and if they can be in parts, what these take.

    With the numbers of the parameters that can be.
    """
    parameters, states = list(model.parameters()), usual_states(optimizers)
    trained = [p.nbytes for p in parameters if p.requires_grad]
    bucket = max([1, min(sum(trained), BUCKET_CAPS[1]), *trained])
    small = sum(size for size in trained if size < BUCKET_CAPS[1])
    owned, copied = sum(trained) * (1 + states), sum(trained)
    needs = [Need(owned, bucket, _BUFFERS * bucket, small, copied=copied)]
    numbers = frozenset(
        number
        for number, parameter in enumerate(parameters)
        if can_be_parted(parameter) and parameter.nbytes >= _MIN_PARTED_BYTES
    )
    if numbers and not config.spares:
        parted = sum(parameters[number].nbytes for number in numbers)
        largest = max(p.nbytes for p in parameters)
        whole = [p.nbytes for n, p in enumerate(parameters) if p.requires_grad and n not in numbers]
        bucket, owned = bucket_cap(largest), owned + parted
        buffers = _VISITS * max(largest, bucket)
        ahead = max(parameters[number].nbytes for number in numbers)
        needs.append(Need(owned, bucket, buffers, ahead, freed=parted, copied=sum(whole)))
    return needs, numbers


def usual_states(optimizers: Sequence[Optimizer]) -> int:
    """Return how many numbers optimizers keep of each parameter, about."""
    has_momentum = any(group.get("momentum") for each in optimizers for group in each.param_groups)
    is_sgd = all(type(each) is SGD for each in optimizers)
    return int(has_momentum) if is_sgd else _USUAL_STATES


def steps_at_once(optimizers: Sequence[Optimizer], is_host: bool) -> bool:
    """Return whether optimizers use torch's `foreach`: its default is the device's.

    AdamW then allocates as much as all parameters that it steps have.
    """
    chosen = [group.get("foreach") for each in optimizers for group in each.param_groups]
    fused = [group.get("fused") for each in optimizers for group in each.param_groups]
    return not all(fused) and any(not is_host if each is None else each for each in chosen)
