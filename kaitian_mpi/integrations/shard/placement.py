"""Where a script's parameters are before they have owners: on the host, if they are large."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from kaitian_mpi.balance.ownership import Part
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.host_parameters import is_large, on_host, stays
from kaitian_mpi.integrations.shard.lent_parameters import (
    LentParameters,
    give_rows,
    give_whole,
    is_lent,
    move_from_meta,
)
from kaitian_mpi.integrations.shard.remote_reads import NOT_YET
from kaitian_mpi.integrations.shard.script_parameters import is_sharded
from kaitian_mpi.mpi.exchange import check_same, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.layouts.shard.row_states import Key
from kaitian_mpi.train.measure.rank_timer import memory_limit
from kaitian_mpi.train.state_transfer import broadcast_state

_SMALL_FRACTION = 0.25  # of a device's memory: parameters that take no more are moved at once
_ADVICE = "create the same model on every rank"

Read = Callable[..., Any]
GiveRows = Callable[[Sequence[Part], Collection[int]], dict[Key, torch.Tensor]]
"""Gives ranks what rank 0 alone has of a model: the rows that they own of the parameters with some
numbers, and the others whole. Returns the rows of this rank."""


class Placement:
    """Decides what stays on the host when a script moves a module, and until when."""

    def __init__(self, world: World, shards_parameters: bool, read_first: Read) -> None:
        """Leave all modules as they are.

        Args:
            world: all ranks.
            shards_parameters: whether parameters of any size stay.
            read_first: asks rank 0 for what `serve` returns. Not collective.
        """
        self._world = world
        self._shards_parameters = shards_parameters
        self._read_first = read_first
        self._assigns = False  # whether parameters are being given to their owners
        self._without_values = weakref.WeakKeyDictionary[nn.Module, list[str]]()
        # By the models that have begun on meta on some rank, in the same order on every rank.
        self._lent: list[Callable[[], LentParameters | None]] = []

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

    def keep_on_meta(
        self, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a change that leaves on meta what rank 0 will give, but follows the dtype."""
        if self._world.rank == 0:
            return change

        def change_or_keep(tensor: torch.Tensor) -> torch.Tensor:
            try:
                return change(tensor)
            except NotImplementedError:
                if not tensor.is_meta:
                    raise
                # It has no values to move.
                return tensor.to(change(torch.empty(0, dtype=tensor.dtype)).dtype)

        return change_or_keep

    def begin(self, module: nn.Module, is_synchronized: bool) -> None:
        """Move a module that begins on meta to this rank's device, without values.

        `synchronize` gives it values; `is_synchronized` says that it will be called. Not
        collective.

        Raises:
            UserError: it will not, or this is rank 0, whose values the other ranks get.
        """
        on_meta = [
            name
            for tensors in (module.named_parameters(), module.named_buffers())
            for name, tensor in tensors
            if tensor.is_meta
        ]
        if not on_meta:
            return
        if self._world.rank == 0 or not is_synchronized:
            raise UserError(
                f"--layout shard: {on_meta[0]} is on meta on rank {self._world.rank}, without "
                "values; create the model with its values on rank 0, which gives them to the "
                "others, and leave init_sync=False out"
            )
        large = [name for name, parameter in module.named_parameters() if is_large(parameter)]
        self._without_values[module] = move_from_meta(module, self._world.device)
        self._lend(module, {*large} & {*on_meta})

    def move_whole(self, module: nn.Module) -> None:
        """Move a module's parameters that stay on the host to this rank's device. Collective."""
        with self.releasing(module) as give:
            give((), ())
            if len({parameter.device for parameter in module.parameters()}) > 1:
                module.to(self._world.device)

    @contextmanager
    def releasing(self, module: nn.Module) -> Iterator[GiveRows]:
        """Make parameters plain ones, still on the host, and yield what gives them to the ranks.

        Parameters that only rank 0 has are without values on the other ranks until they are given.
        In the block, modules move as usual: nothing stays on the host.
        """
        staying = [(parameter, holder) for _, parameter, holder in on_host(module)]
        lent = [
            number for number, parameter in enumerate(module.parameters()) if is_lent(parameter)
        ]
        for holder in dict.fromkeys(holder for _, holder in staying):
            holder.release([parameter for parameter, _ in staying])
        self._assigns = True
        try:
            yield partial(self._hand_over, [*module.parameters()], lent)
        finally:
            self._assigns = False

    def synchronize(self, module: nn.Module) -> set[str]:
        """Give all ranks rank 0's values of parameters that stay on some rank's host. Collective.

        What some rank has had on meta is given too; but of large parameters of these, the others
        get values only where they read them, and later their rows.

        Returns:
            The names of the parameters and buffers that all ranks have equal now, or own rows of.
        """
        comm = self._world.comm
        parameters = dict(module.named_parameters())
        shapes = {name: str(list(p.shape)) for name, p in parameters.items() if is_large(p)}
        check_same(comm, shapes, _ADVICE)
        missing_here = self._without_values.pop(module, [])
        staying_here = [name for name, parameter, _ in on_host(module) if not is_lent(parameter)]
        gathered = gather_values(comm, [staying_here, missing_here])
        staying = sorted({name for names, _ in gathered for name in names})
        missing = sorted({name for _, names in gathered for name in names})
        if missing:
            self._give_missing(module, missing, missing_here)
        values = {
            name: holder.values_of(p) for name, p, holder in on_host(module) if not is_lent(p)
        }
        for name in staying:
            if not is_lent(parameters[name]):
                self._give(values.get(name, parameters[name]))
        owned = {name for name, parameter in parameters.items() if is_sharded(parameter)}
        return owned | {*staying, *missing}

    def free(self) -> None:
        """Free what this rank has used of what rank 0 has, and take its changes. Not collective."""
        for lent in self._lent:
            holder = lent()
            if holder is not None:
                holder.free()

    def serve(self, index: int, number: int, changes: int) -> Any:
        """Return rank 0's values of a parameter: see `LentParameters.serve`."""
        if index >= len(self._lent):
            return NOT_YET
        holder = self._lent[index]()
        if holder is None:
            raise UserError(
                "--layout shard: a rank reads a model that rank 0's script has deleted; delete it "
                "on all ranks, or on none"
            )
        return holder.serve(number, changes)

    def _give_missing(
        self, module: nn.Module, missing: Sequence[str], missing_here: Collection[str]
    ) -> None:
        """Give ranks what they have no values of; what is large stays on rank 0. Collective."""
        parameters = dict(module.named_parameters())
        tensors: dict[str, torch.Tensor] = parameters | dict(module.named_buffers())
        forms = {name: _form(tensors.get(name)) for name in missing}
        check_same(self._world.comm, forms, _ADVICE)
        large = [name for name in missing if name in parameters and is_large(parameters[name])]
        holder = self._lend(module, large)
        for name in missing:
            if name not in parameters:  # a buffer that ranks have may differ, as DDP permits
                self._give(tensors[name], receives=name in missing_here)
            elif not is_lent(parameters[name]):
                self._give(tensors[name])
        self._lent.append(_nothing if holder is None else weakref.ref(holder))

    def _give(self, values: torch.Tensor, receives: bool = True) -> None:
        """Let a tensor have rank 0's values on all ranks, if they are to receive. Collective."""
        is_first = self._world.rank == 0
        arrived = broadcast_state(self._world.comm, values.detach(), 0, receives and not is_first)
        if arrived is not None and not is_first:
            values.detach().copy_(arrived)

    def _lend(self, module: nn.Module, names: Collection[str]) -> LentParameters | None:
        """Let rank 0 alone have the values of large parameters. Not collective."""
        lent = {
            number: parameter
            for number, (name, parameter) in enumerate(module.named_parameters())
            if name in names and not is_lent(parameter)
        }
        if not lent:
            return None
        device = next(iter(lent.values())).device
        for holder in {holder for name, _, holder in on_host(module) if name in names}:
            holder.release([*lent.values()])
        read = None if self._world.rank == 0 else partial(self._read_first, len(self._lent))
        return LentParameters(module, lent.keys(), device, read)

    def _hand_over(
        self,
        parameters: Sequence[nn.Parameter],
        lent: Sequence[int],
        parts: Sequence[Part],
        sharded: Collection[int],
    ) -> dict[Key, torch.Tensor]:
        give_whole(self._world.comm, [parameters[n] for n in lent if n not in sharded])
        handed_over = [
            part for part in parts if part.parameter in lent and part.parameter in sharded
        ]
        return dict(give_rows(self._world.comm, parameters, handed_over))


def _nothing() -> None:
    return None


def _form(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "absent"
    order = "" if is_sharded(tensor) or tensor.is_contiguous() else ", not contiguous"
    return f"{tensor.dtype} {list(tensor.shape)}{order}"
