"""How much memory each rank has for gradients and optimizer state, in layout shard."""

from __future__ import annotations

from torch.optim import SGD

from kaitian_mpi.distributed.shards import BUCKET_CAPS
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.measure.rank_timer import memory_limit
from kaitian_mpi.train.setup import Setup

_BUFFERS = 4  # of a bucket: its gradients, two that are being summed, and the heap's gaps
_USUAL_STATES = 2  # of an optimizer, in parameters: Adam's moments


def find_room(setup: Setup, world: World) -> tuple[dict[str, float], int]:
    """Return the bytes that each rank has for the state, by place, and how many this one will use.

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
    room = gather_values(world.comm, own)
    if sum(room) < needed:
        has = ", ".join(f"{each / 1e6:.0f}" for each in room)
        raise AgreedError(
            f"--layout shard: gradients and optimizer state take {needed / 1e6:.0f} MB, but next "
            f"to the model the ranks have room for {has} MB; start more ranks, or use a smaller "
            "model or an optimizer with less state"
        )
    places = [info.place for info in world.infos]
    reserved = needed * own / sum(room) + _BUFFERS * bucket
    return dict(zip(places, room, strict=True)), int(reserved)
