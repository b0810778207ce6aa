"""Where a script's parameters are before they have owners: on the host, if they are large."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from kaitian_mpi.integrations.shard.host_parameters import is_large, on_host, stays
from kaitian_mpi.integrations.shard.script_parameters import is_sharded
from kaitian_mpi.mpi.exchange import check_same, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.measure.rank_timer import memory_limit
from kaitian_mpi.train.state_transfer import broadcast_state

_SMALL_FRACTION = 0.25  # of a device's memory: parameters that take no more are moved at once


class Placement:
    """Decides what stays on the host when a script moves a module, and until when."""

    def __init__(self, world: World, shards_parameters: bool) -> None:
        """Leave all modules as they are. `shards_parameters` lets those of any size stay."""
        self._world = world
        self._shards_parameters = shards_parameters
        self._assigns = False  # whether parameters are being given to their owners

    def device_to_spare(
        self, module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.device | None:
        """Return the device to which a change moves a module that may not fit there whole.

        Not collective. None if it moves it to no accelerator, or the module is small.
        """
        if self._assigns or self._world.info.is_on_host:
            return None
        large = sum(p.nbytes for p in module.parameters() if stays(p))
        if not large:
            return None
        device = change(torch.empty(0)).device
        if device.type != self._world.device.type:
            return None
        is_small = large <= _SMALL_FRACTION * memory_limit(self._world)
        return None if is_small and not self._shards_parameters else device

    def move_whole(self, module: nn.Module) -> None:
        """Move a module's parameters that stay on the host to this rank's device."""
        with self.releasing(module) as stayed:
            if stayed:
                module.to(self._world.device)

    @contextmanager
    def releasing(self, module: nn.Module) -> Iterator[bool]:
        """Let parameters be plain ones, on the host, that stay there; yield whether some did.

        In the block, no others stay when they are moved.
        """
        staying = [(parameter, holder) for _, parameter, holder in on_host(module)]
        for holder in dict.fromkeys(holder for _, holder in staying):
            holder.release([parameter for parameter, _ in staying])
        self._assigns = True
        try:
            yield bool(staying)
        finally:
            self._assigns = False

    def synchronize(self, module: nn.Module) -> set[str]:
        """Give all ranks rank 0's values of parameters that stay on some rank's host. Collective.

        Returns:
            The names of the parameters that all ranks have equal now, or own rows of.
        """
        parameters = dict(module.named_parameters())
        shapes = {name: str(list(p.shape)) for name, p in parameters.items() if is_large(p)}
        check_same(self._world.comm, shapes, "create the same model on every rank")
        staying = {name: holder for name, _, holder in on_host(module)}
        names = sorted(
            {name for own in gather_values(self._world.comm, [*staying]) for name in own}
        )
        for name in names:
            parameter = parameters[name]
            holder = staying.get(name)
            value = parameter.detach() if holder is None else holder.values_of(parameter)  # type: ignore[arg-type]
            arrived = broadcast_state(self._world.comm, value, 0, self._world.rank > 0)
            if self._world.rank > 0:
                value.copy_(arrived)
        owned = {
            name for name, parameter in parameters.items() if is_sharded(parameter)
        } - staying.keys()
        return owned | set(names)
