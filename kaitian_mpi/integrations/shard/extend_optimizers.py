"""Lets optimizers have this rank's rows in a step, and the whole state when it is read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from kaitian_mpi.integrations.shard.owned_optimizer import OwnedOptimizer
from kaitian_mpi.integrations.shard.replaced import replace_all
from kaitian_mpi.integrations.shard.trainer_shards import TrainerShards


def extend_optimizers(shards: TrainerShards) -> Callable[[], None]:
    """Extend torch's optimizers; return what restores them."""
    create: Any = Optimizer.__init__
    whole_state: Any = Optimizer.state_dict
    load: Any = Optimizer.load_state_dict
    pickled: Any = Optimizer.__getstate__

    @functools.wraps(create)
    def create_and_note(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        create(optimizer, *args, **kwargs)
        shards.add_optimizer(optimizer)

    @functools.wraps(whole_state)
    def state_dict(optimizer: Optimizer) -> Any:
        owned = shards.optimizer_of(optimizer)
        if owned is None or owned.is_inside:
            return whole_state(optimizer)
        owned.follow(optimizer, owned.models)
        return owned.state_dict(optimizer, whole_state, shards.reads)

    @functools.wraps(load)
    def load_state_dict(optimizer: Optimizer, state_dict: Any) -> None:
        owned = shards.own(optimizer)
        if owned is None or owned.is_inside:
            load(optimizer, state_dict)
        else:
            owned.load(optimizer, state_dict, load)

    @functools.wraps(pickled)
    def getstate(optimizer: Optimizer) -> dict[str, Any]:
        """Return what a copy, or a file, of an optimizer has."""
        content: dict[str, Any] = pickled(optimizer)
        owned = shards.optimizer_of(optimizer)
        if owned is None or owned.is_inside or not owned.has_begun:
            return content
        return {**content, "state": owned.whole_state(optimizer, whole_state, shards.reads)}

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        owned = shards.own(optimizer)
        if owned is None:
            return None
        if owned.is_inside:  # an earlier step has failed
            owned.leave(optimizer)
        for model in owned.models:
            model.before_step()
        owned.enter(optimizer)
        args = tuple(_outside(owned, optimizer, argument) for argument in args)
        return args, {name: _outside(owned, optimizer, value) for name, value in kwargs.items()}

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        owned = shards.optimizer_of(optimizer)
        if owned is not None and owned.is_inside:
            owned.end_step(optimizer)
            for model in owned.models:
                model.after_step()

    replaced = {
        "__init__": create_and_note,
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
        "__getstate__": getstate,
    }
    restore_methods = replace_all((Optimizer, *pair) for pair in replaced.items())
    hooks = [
        register_optimizer_step_pre_hook(before_step),
        register_optimizer_step_post_hook(after_step),
    ]

    def restore() -> None:
        restore_methods()
        for hook in hooks:
            hook.remove()

    return restore


def _outside(owned: OwnedOptimizer, optimizer: Optimizer, argument: Any) -> Any:
    """Return an argument of a step; a closure then sees the model's parameters."""
    if not callable(argument) or isinstance(argument, Optimizer):
        return argument

    @functools.wraps(argument)
    def call() -> Any:
        owned.leave(optimizer)
        try:
            with torch.enable_grad():
                return argument()
        finally:
            for model in owned.models:
                model.before_step()
            owned.enter(optimizer)

    return call
