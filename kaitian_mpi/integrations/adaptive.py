"""Adaptive batches in a script's own trainer: what `kaitian-run --adaptive` installs.

Every trainer passes three places of torch. A `DataLoader` gives each rank its planned slice of the
ranks' batches (planned_batches.py). `DistributedDataParallel` averages the ranks' gradients: each
is weighted by its slice on its way into the model (adaptive_forwards.py), so that the average is
the gradient of the global batch. When a backward has ended, the ranks exchange their times, and
after it they plan (loader_plans.py).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.sync_batch_norm import (
    Participation,
    convert_sync_batchnorm,
    participate,
)
from kaitian_mpi.integrations.adaptive_forwards import WeightedForwards
from kaitian_mpi.integrations.adaptive_plan import AdaptivePlan
from kaitian_mpi.integrations.forward_by_name import extend_forward, hook_by_name
from kaitian_mpi.integrations.lightning_means import count_rows_exactly
from kaitian_mpi.integrations.loader_plans import LoaderPlans
from kaitian_mpi.integrations.loss_weights import Ranks
from kaitian_mpi.integrations.output_weights import OutputWeights
from kaitian_mpi.integrations.planned_batches import PlannedBatchSampler
from kaitian_mpi.integrations.planned_loaders import plan_loaders
from kaitian_mpi.integrations.step_timer import StepTimer
from kaitian_mpi.integrations.taken_batches import BatchRows, Iteration, TakenBatches
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close


@not_compiled
class Adaptive:
    """The adaptive batches of this process's trainer.

    The batch sizes that the script asked for, equal on all ranks, are the first plan.
    """

    def __init__(self, world: World) -> None:
        """Extend DataLoader, DistributedDataParallel and the optimizers' step. Collective."""
        self.rank = world.rank
        self.size = world.size
        self.world = world
        self._said: set[str] = set()
        comm = world.comm.Dup()
        self._times = StepTimer(comm, world.device_kind)
        self._ranks = Ranks(world, comm, self._times.waiting)
        self._weights = OutputWeights(self._ranks)
        self._plans = LoaderPlans(self._ranks)
        self._taken = TakenBatches()
        self.forwards = WeightedForwards(
            self._ranks, self._weights, self._plans, self._taken, self._times
        )
        check_step = register_optimizer_step_post_hook(self.forwards.check_step)
        self._restore = [plan_loaders(self), self._extend_ddp(), check_step.remove]
        register_close(self._receive_all)

    def close(self) -> None:
        """Remove the extensions; loaders that follow the plan keep its shares. Collective."""
        while self._restore:
            self._restore.pop()()
        unregister_close(self._receive_all)
        self._receive_all()
        _installed.clear()

    def waiting(self, _: str = "") -> contextlib.AbstractContextManager[None]:
        """Return a context whose time is one of waiting for other ranks, not of computing."""
        return self._times.waiting()

    def plan_of(self, sampler: PlannedBatchSampler) -> AdaptivePlan:
        """Return the plan that divides a loader's batches; an equal one before it trains."""
        return self._plans.plan_of(sampler)

    def gather_numbers(self, number: int) -> list[int]:
        """Return every rank's number. Collective."""
        return self._ranks.gather_numbers(number)

    def say(self, text: str) -> None:
        """Print a line on rank 0, once. Not collective."""
        if text not in self._said:
            self._said.add(text)
            print_rank_0(self.world, text)

    def has_new_plan(self) -> bool:
        """Return whether the ranks' times of the last step have changed the plan. Collective."""
        times = self._times.receive()
        change = self._plans.observe(times) if times is not None else ""
        if change:
            print_rank_0(self.world, f"step {self._times.steps}: {change}")
        return bool(change)

    def is_training(self) -> bool:
        """Return whether a model is in training mode, such as before its first batch."""
        return self.forwards.is_training()

    def batch_taken(self, iteration: Iteration, rows: BatchRows, batch: Any) -> None:
        """Record that the script has taken a batch."""
        self._taken.take(iteration, rows, batch, self.is_training())

    def unplanned_loader_iterated(self, is_stream: bool) -> None:
        """Record that the script iterates over a loader that does not follow the plan."""
        self._taken.add_unplanned_loader(self.is_training(), is_stream)

    def _extend_ddp(self) -> Callable[[], None]:
        """Watch every model that DDP wraps from now on; return a function that undoes this."""
        create = DistributedDataParallel.__init__

        @functools.wraps(create)
        def create_and_watch(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            self._convert_norms(kwargs["module"] if "module" in kwargs else args[0])
            create(model, *args, **kwargs)
            self._weights.watch(model)
            count_rows_exactly(self.forwards.counts)
            if "transformers.trainer" in sys.modules:
                from kaitian_mpi.integrations.logged_losses import weight_losses

                weight_losses(self._weights, self.forwards.step_of)
            model.register_forward_pre_hook(_WatchBegin(), with_kwargs=True)
            # First, as a look at the loss's graph must not call hooks that others give the outputs.
            model.register_forward_hook(_ForwardHook(), with_kwargs=True, prepend=True)
            model.register_forward_hook(_ForwardEnd(), always_call=True)
            hook_by_name(model)

        restore_forward = extend_forward()

        def restore() -> None:
            DistributedDataParallel.__init__ = create  # type: ignore[method-assign]
            restore_forward()

        DistributedDataParallel.__init__ = create_and_watch  # type: ignore[assignment, method-assign]
        return restore

    def _convert_norms(self, module: nn.Module) -> None:
        """Make torch's `SyncBatchNorm`, which refuses CPUs, one that works on every device."""
        for norm in module.modules():
            if isinstance(norm, nn.SyncBatchNorm):
                convert_sync_batchnorm(norm, norm.process_group)
                participate(norm, _Rows(self.forwards))

    def _receive_all(self) -> None:
        self._times.receive()


class _Rows(Participation):
    """Whether a rank's rows count in the statistics; their gradients are weighted already."""

    def __init__(self, forwards: WeightedForwards) -> None:
        super().__init__()
        self._forwards = forwards

    @property
    def counts(self) -> bool:
        return self._forwards.counts()


@not_compiled
class _WatchBegin:
    """A forward pre-hook; without a state of its own, so that a model can be copied and pickled."""

    def __call__(self, model: Any, args: Any, kwargs: Any) -> Any:
        return _installed[0].forwards.before_forward(model, args, kwargs) if _installed else None


@not_compiled
class _ForwardHook:
    """A forward hook; without a state of its own, so that a model can be copied and pickled."""

    def __call__(self, model: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if not _installed:
            return None
        return _installed[0].forwards.after_forward(model, args, kwargs, output)


@not_compiled
class _ForwardEnd:
    """A forward hook that is called in any case; without a state of its own, as the others."""

    def __call__(self, *_: Any) -> None:
        if _installed:
            _installed[0].forwards.end_forward()


_installed: list[Adaptive] = []


def install(world: World) -> Adaptive | None:
    """Make the batches of this process's trainer adaptive; does nothing in a job of one rank.

    Call it before the script creates its loaders and its model's `DistributedDataParallel`.
    Collective over all ranks. Called again, it returns the same.
    """
    if not _installed and world.size > 1:
        _installed.append(Adaptive(world))
    return _installed[0] if _installed else None
