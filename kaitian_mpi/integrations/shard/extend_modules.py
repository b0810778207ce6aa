"""Lets modules be moved and saved, and checkpoints be loaded, without whole copies on each rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi.devices import device_of
from kaitian_mpi.integrations.shard.early_state_dicts import shared_outside
from kaitian_mpi.integrations.shard.host_parameters import HostParameters, stays
from kaitian_mpi.integrations.shard.replaced import replace_all
from kaitian_mpi.integrations.shard.script_parameters import is_sharded
from kaitian_mpi.integrations.shard.trainer_shards import TrainerShards


def extend_modules(shards: TrainerShards) -> Callable[[], None]:
    """Extend torch's modules, `torch.load` and barrier; return what restores them."""
    return replace_all(
        [
            (nn.Module, "state_dict", _state_dict(nn.Module.state_dict, shards)),
            (nn.Module, "_apply", _apply(nn.Module._apply, shards)),
            (torch, "load", _load(torch.load)),
            (dist, "barrier", _barrier(dist.barrier, shards)),
        ]
    )


def _state_dict(stock: Any, shards: TrainerShards) -> Any:
    @functools.wraps(stock)
    def lazy_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            sharded = [parameter for parameter in module.parameters() if is_sharded(parameter)]
            for holder in dict.fromkeys(type(parameter).holder for parameter in sharded):
                stack.enter_context(holder.in_state_dicts.making())
            content = stock(module, *args, **kwargs)
        if kwargs.get("destination") is None:  # else it is of a submodule, within another one
            shards.state_dicts.note(content)
        return content

    return lazy_state_dict


def _apply(stock: Any, shards: TrainerShards) -> Any:
    staying = set[int]()  # the parameters that a move now leaves on the host

    @functools.wraps(stock)
    def apply_to_whole(module: nn.Module, change: Any, recurse: bool = True) -> Any:
        """Change, or move, what is whole; rows stay where their owner has them."""
        change = shards.placement.keep_on_meta(change)
        device = None if staying else shards.placement.device_to_spare(module, change)
        if device is not None:
            numbers = [number for number, p in enumerate(module.parameters()) if stays(p)]
            staying.update(id(p) for p in module.parameters() if stays(p))
        left = {
            name: parameter
            for name, parameter in module._parameters.items()
            if id(parameter) in staying or is_sharded(parameter)
        }
        for holder in dict.fromkeys(type(p).holder for p in left.values() if is_sharded(p)):
            holder.move(change)
        module._parameters.update(dict.fromkeys(left))
        try:
            moved = stock(module, change, recurse)
        finally:
            module._parameters.update(left)
            if device is not None:
                staying.clear()
        if device is not None:
            _unshare(module, numbers)
            HostParameters(module, numbers, device)
        return moved

    return apply_to_whole


def _load(stock: Any) -> Any:
    @functools.wraps(stock)
    def load_on_host(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load an optimizer's state on the host, whatever device the script names.

        Trainers load the whole state, of which a device has memory for its rows only.
        """
        is_device = isinstance(map_location, str | torch.device)
        if is_device and isinstance(file, str | Path):
            device = device_of(torch.device(map_location))
            state = None if device.is_host else _optimizer_state(stock, file)
            if state is not None:
                return state
        return stock(file, map_location, *args, **kwargs)

    return load_on_host


def _barrier(stock: Any, shards: TrainerShards) -> Any:
    @functools.wraps(stock)
    def barrier_after_changes(*args: Any, **kwargs: Any) -> Any:
        """Let other ranks read what the script has changed unseen, while it waits for them."""
        for model in shards.models():
            if model.sharded is not None:
                model.sharded.free()
        shards.placement.free()
        return stock(*args, **kwargs)

    return barrier_after_changes


def _unshare(module: nn.Module, numbers: Sequence[int]) -> None:
    """Give parameters memory of their own, as those that are moved to a device have."""
    shared = shared_outside(module)
    parameters = [*module.parameters()]
    for parameter in (parameters[number] for number in numbers):
        if parameter.untyped_storage().data_ptr() in shared:
            parameter.data = parameter.data.clone()


def _optimizer_state(load: Any, file: str | Path) -> Any:
    """Return an optimizer's `state_dict`, mapped on the host; None if the file has another one."""
    try:
        state = load(file, "cpu", weights_only=True, mmap=True)
    except Exception:  # not a file of tensors and plain values: the script may know better
        return None
    return state if isinstance(state, dict) and {"state", "param_groups"} <= state.keys() else None
