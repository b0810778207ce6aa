"""How much memory each rank has for gradients and optimizer state, in layout shard."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from torch.optim import SGD

from kaitian_mpi.balance.ownership import NO_MIRROR, Pair, with_mirrors, without_mirrors
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.shards import BUCKET_CAPS
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.train.measure.rank_timer import memory_limit
from kaitian_mpi.train.setup import Setup

_BUFFERS = 4  # of a bucket: its gradients, two that are being summed, and the heap's gaps
_USUAL_STATES = 2  # of an optimizer, in parameters: Adam's moments
# What mirrors may take of a rank's room, with what it owns; the rest is for activations. On a host
# also for moving the state after a loss: the new parts are there before the old ones are freed.
_MOST, _MOST_ON_HOST = 0.75, 0.4
_ALIKE = 0.95  # of another rank's room is as much as that


class Room(NamedTuple):
    """The memory for gradients and optimizer state, in bytes."""

    by_place: dict[str, float]
    """What each rank has."""
    needed: int
    """What all of it takes, once."""
    buffers: int
    """What a rank needs besides."""
    small: int = 0
    """What all parameters take that share a bucket with others."""

    def owners(self, config: TrainingConfig, world: World) -> tuple[list[Pair], str]:
        """Return who owns what, and its mirrors; or else why there are none. Not collective.

        Raises:
            AgreedError: it does not fit, on all ranks.
        """
        given = sorted(rooms := [self.by_place[info.place] for info in world.infos])
        # Equal devices get equal parts, which libraries exchange faster, in few pairs.
        rooms = [given[bisect_left(given, _ALIKE * room)] for room in rooms]
        if sum(rooms) < self.needed:
            has = ", ".join(f"{each / 1e6:.0f}" for each in rooms)
            raise AgreedError(
                f"--layout shard: gradients and optimizer state take {self.needed / 1e6:.0f} MB, "
                f"but next to the model the ranks have room for {has} MB; start more ranks, or use "
                "a smaller model or an optimizer with less state"
            )
        alone = without_mirrors(rooms)
        if sum(room > 0 for room in rooms) < 2:
            return alone, "as one rank has all"
        if not config.mirrors:
            return alone, "as --no-mirrors asks"
        if not ulfm.is_enabled():
            return alone, "as fault tolerance is off"
        pairs = with_mirrors(rooms, [info.host for info in world.infos])
        taken = self.taken(pairs, world.size)
        most = [_MOST_ON_HOST if info.is_on_host else _MOST for info in world.infos]
        if any(own > part * room for own, part, room in zip(taken, most, rooms, strict=True)):
            return alone, f"as there is no room for another {self.needed / 1e6:.0f} MB"
        return pairs, ""

    def can_overlap(self, pairs: list[Pair], world: World) -> bool:
        """Return whether there is memory to receive all values at once. Not collective."""
        rooms = [self.by_place[info.place] for info in world.infos]
        taken = self.taken(pairs, world.size)
        return all(own + self.small <= _MOST * room for own, room in zip(taken, rooms, strict=True))

    def taken(self, pairs: list[Pair], size: int) -> list[float]:
        """Return the bytes of gradients and optimizer state that each of `size` ranks will have."""
        taken = [0.0] * size
        for owner, mirror, fraction in pairs:
            for rank in {owner, mirror} - {NO_MIRROR}:
                taken[rank] += fraction * self.needed
        return taken

    def describe(self, owned: list[float], mirrored: list[float], why: str) -> str:
        """Return a line that says which fractions ranks have, or `why` there are no mirrors."""
        shares = ", ".join(f"{each:.1%}" for each in owned)
        whole = f"{self.needed / 1e6:.3g} MB"
        line = f"layout shard: gradients and optimizer state by rank {shares} of {whole}"
        if len(owned) == 1:
            return line
        if why:
            return f"{line}; no mirrors, {why}"
        return line + "; mirrors " + ", ".join(f"{each:.1%}" for each in mirrored)


def find_room(setup: Setup, config: TrainingConfig, world: World) -> tuple[Room, int]:
    """Return the memory for the state, and how many bytes of it this rank will use.

    The state is the gradients and what the optimizers keep. What a rank has left beyond its part is
    for the activations, so each keeps the same fraction for them. Moves the model to the device.
    Collective.

    Raises:
        AgreedError: the state does not fit.
    """
    with agree_on_errors(world.comm):
        model = setup.task.model.to(world.device)
        optimizers = setup.task.make_optimizers(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    whole = sum(p.nbytes for p in trained)
    has_momentum = any(group.get("momentum") for each in optimizers for group in each.param_groups)
    is_sgd = all(type(each) is SGD for each in optimizers)
    needed = whole * (1 + (int(has_momentum) if is_sgd else _USUAL_STATES))
    bucket = max(min(whole, BUCKET_CAPS[1]), *(p.nbytes for p in trained))
    used = world.device_kind.memory_peak_bytes(world.device_index)
    own = max(0.0, memory_limit(world) - used - _BUFFERS * bucket)
    rooms = gather_values(world.comm, own)
    by_place = dict(zip([info.place for info in world.infos], rooms, strict=True))
    small = sum(p.nbytes for p in trained if p.nbytes < BUCKET_CAPS[1])
    room = Room(by_place, needed, _BUFFERS * bucket, small)
    pairs, _ = room.owners(config, world)
    buffers = room.buffers + small * room.can_overlap(pairs, world)
    return room, int(room.taken(pairs, world.size)[world.rank]) + buffers
