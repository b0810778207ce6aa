"""A step in which each rank applies its part of the summed gradient, as in all but replicate."""

from __future__ import annotations

from typing import Protocol

import torch

from kaitian_mpi.distributed.step_facts import StepFacts
from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.polling import WaitContext
from kaitian_mpi.train.layouts.divided_state import DividedState
from kaitian_mpi.train.state import State
from kaitian_mpi.train.task import Task


class StepSums(Protocol):
    """What is known of a step's summed gradients on all ranks, each of which has some."""

    waits: WaitContext

    @property
    def factor(self) -> float: ...
    @property
    def squared_norm(self) -> float: ...
    def share_values(self) -> None: ...


class DividedGradients:
    """The gradients of a step of which each rank has some; in the place of a reducer.

    All ranks that have a parameter step it alike, with the same gradient. After `finish`, all ranks
    know the mean loss, `number`, and the whole gradient's `squared_norm`.
    """

    carries_number = True

    def __init__(self, waits: WaitContext) -> None:
        """Know nothing of a step yet. Not collective."""
        self.waits = waits
        self.factor = 1.0
        """What the gradients are to be multiplied by."""
        self._facts = StepFacts()

    @property
    def number(self) -> torch.Tensor:
        """The mean loss over the global batch; float64, without dimensions."""
        return self._facts.number * self.factor

    @property
    def squared_norm(self) -> float:
        """Of the whole gradient, times `factor`; the same on every rank."""
        return self._facts.squared_norm * self.factor**2

    def is_finite(self) -> bool:
        """Return whether the gradients of the last `finish` have no NaN and no infinity."""
        return self._facts.is_finite

    def share_values(self) -> None:
        """Do nothing: each rank has stepped what it has."""

    def check_values(self) -> None:
        """Do nothing: no values are under way."""


def check_parts(task: Task, layout: str) -> None:
    """Check that a task can be trained in a layout in which each rank steps a part.

    Raises:
        UserError: it clips by a function, and no rank has all gradients; or some are complex.
    """
    if any(parameter.is_complex() for parameter in task.model.parameters()):
        raise UserError("complex parameters require --layout replicate")
    if callable(task.clip_norm):
        raise UserError(
            f"--layout {layout} requires Task(clip_norm=...) to be a number: no rank has all "
            "gradients"
        )


def apply_step(reducer: StepSums, task: Task, state: State, is_finite: bool, samples: int) -> None:
    """Apply a step of all ranks' `samples` to the owned parts, and share their values. Collective.

    The weights stay if the gradient is not finite.
    """
    partition = state.partition
    scaler = state.computation.scaler
    assert isinstance(partition, DividedState)
    with state.lock:
        if is_finite:
            scale = scaler.get_scale() if scaler.is_enabled() else 1.0
            factor = reducer.factor / scale
            if task.clip_norm is not None:
                assert not callable(task.clip_norm)
                norm = reducer.squared_norm**0.5 / scale
                factor *= min(1.0, task.clip_norm / (norm + 1e-6))
            if factor != 1:
                gradients = [t.grad for t in partition.targets.values() if t.grad is not None]
                if gradients:
                    torch._foreach_mul_(gradients, factor)
            partition.follow_data()
            for optimizer in state.optimizers:
                optimizer.step()
            for scheduler in state.schedulers:
                if hasattr(scheduler, "step"):
                    scheduler.step()
        if scaler.is_enabled():
            _update_scale(scaler, is_finite)
        state.zero_gradients()
        state.progress.step_done(samples)
        if is_finite:
            with reducer.waits("the owners' values"):
                reducer.share_values()


def _update_scale(scaler: torch.amp.GradScaler, is_finite: bool) -> None:
    """Do what `GradScaler.update` does, on all ranks alike: some may have no gradient."""
    content = scaler.state_dict()
    content["_growth_tracker"] = content["_growth_tracker"] + 1 if is_finite else 0
    if not is_finite:
        content["scale"] *= content["backoff_factor"]
    elif content["_growth_tracker"] == content["growth_interval"]:
        content["scale"] *= content["growth_factor"]
        content["_growth_tracker"] = 0
    scaler.load_state_dict(content)
