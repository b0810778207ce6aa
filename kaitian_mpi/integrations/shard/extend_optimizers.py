"""Lets optimizers have this rank's rows in a step, and the whole state when it is read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from kaitian_mpi.integrations.shard.owned_optimizer import OwnedOptimizer, Step
from kaitian_mpi.integrations.shard.replaced import replace_all
from kaitian_mpi.integrations.shard.trainer_shards import TrainerShards


def extend_optimizers(shards: TrainerShards) -> Callable[[], None]:
    """Extend torch's optimizers; return what restores them."""
    stock_state: Any = Optimizer.state_dict
    stock_end: Any = Optimizer._optimizer_step_code
    restore_methods = replace_all(
        [
            (Optimizer, "__init__", _create(Optimizer.__init__, shards)),
            (Optimizer, "state_dict", _state_dict(stock_state, shards)),
            (Optimizer, "load_state_dict", _load_state_dict(Optimizer.load_state_dict, shards)),
            (Optimizer, "__getstate__", _getstate(Optimizer.__getstate__, stock_state, shards)),
            # Called before all hooks after a step, in which a script may average weights.
            (Optimizer, "_optimizer_step_code", _after_step(stock_end, shards)),
        ]
    )
    hook = register_optimizer_step_pre_hook(_before_step(shards))

    def restore() -> None:
        restore_methods()
        hook.remove()

    return restore


def _create(stock: Any, shards: TrainerShards) -> Any:
    @functools.wraps(stock)
    def create_and_note(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        stock(optimizer, *args, **kwargs)
        shards.optimizers.add(optimizer)

    return create_and_note


def _state_dict(stock: Any, shards: TrainerShards) -> Any:
    @functools.wraps(stock)
    def state_dict(optimizer: Optimizer) -> Any:
        owned = shards.optimizers.get(optimizer)
        if owned is None or owned.has_rows:
            return stock(optimizer)
        owned.follow(optimizer, owned.models)
        return owned.state_dict(optimizer, stock, shards.reads)

    return state_dict


def _load_state_dict(stock: Any, shards: TrainerShards) -> Any:
    @functools.wraps(stock)
    def load_state_dict(optimizer: Optimizer, state_dict: Any) -> None:
        owned = shards.optimizers.own(optimizer)
        if owned is None or owned.has_rows:
            stock(optimizer, state_dict)
        else:
            owned.load(optimizer, state_dict, stock)

    return load_state_dict


def _getstate(stock: Any, stock_state: Any, shards: TrainerShards) -> Any:
    @functools.wraps(stock)
    def getstate(optimizer: Optimizer) -> dict[str, Any]:
        """Return what a copy, or a file, of an optimizer has."""
        content: dict[str, Any] = stock(optimizer)
        owned = shards.optimizers.get(optimizer)
        if owned is None or owned.has_rows or not owned.has_begun:
            return content
        return {**content, "state": owned.whole_state(optimizer, stock_state, shards.reads)}

    return getstate


def _before_step(shards: TrainerShards) -> Any:
    def enter(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        in_steps = shards.optimizers.in_steps()
        for other, owned_by_other in in_steps:
            owned_by_other.swap_out_rows(other)
        around = [step for step in in_steps if step[0] is not optimizer]
        owned = shards.optimizers.own(optimizer)
        if owned is None:
            _go_on(around)
            return None
        for model in owned.models:
            model.passes.before_step()
        owned.swap_in_rows(optimizer, around)
        args = tuple(_outside(owned, optimizer, argument) for argument in args)
        return args, {name: _outside(owned, optimizer, value) for name, value in kwargs.items()}

    return enter


def _after_step(stock: Any, shards: TrainerShards) -> Any:
    @functools.wraps(stock)
    def end(optimizer: Optimizer) -> None:
        stock(optimizer)
        owned = shards.optimizers.get(optimizer)
        if owned is not None and owned.has_rows:
            around = owned.end_step(optimizer)
            for model in owned.models:
                model.passes.after_step()
            _go_on(around)

    return end


def _go_on(steps: Sequence[Step]) -> None:
    """Let optimizers have this rank's rows again, whose steps were left."""
    for optimizer, owned in steps:
        owned.swap_in_rows(optimizer)


def _outside(owned: OwnedOptimizer, optimizer: Optimizer, argument: Any) -> Any:
    """Return an argument of a step; a closure then sees the model's parameters."""
    if not callable(argument) or isinstance(argument, Optimizer):
        return argument

    @functools.wraps(argument)
    def call() -> Any:
        if not owned.has_rows:  # the step of another one has been called, which calls this
            return argument()
        owned.swap_out_rows(optimizer)
        try:
            with torch.enable_grad():
                return argument()
        finally:
            for model in owned.models:
                model.passes.before_step()
            owned.swap_in_rows(optimizer)

    return call
