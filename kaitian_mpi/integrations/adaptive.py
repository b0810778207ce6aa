"""Adaptive batches in a script's own trainer: what `kaitian-run --adaptive` installs.

Every trainer passes three places of torch. A `DataLoader` gives each rank its planned slice of the
ranks' batches (batches.py). `DistributedDataParallel` averages the ranks' gradients: each is
weighted by its slice on its way into the model (weights.py), so that the average is the gradient of
the global batch. When a backward has ended, the ranks exchange their times, and after it they plan.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.data_parallel import first_length
from kaitian_mpi.distributed.sync_batch_norm import (
    Participation,
    SyncBatchNorm,
    convert_sync_batchnorm,
    participate,
)
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.integrations.batches import Cut, cut_loaders
from kaitian_mpi.integrations.lightning_means import count_rows_exactly
from kaitian_mpi.integrations.loss_weights import Forward, Ranks
from kaitian_mpi.integrations.losses import is_lightning
from kaitian_mpi.integrations.plan import AdaptivePlan, StepTimer
from kaitian_mpi.integrations.taken import Given, Iteration, Taken, TakenBatches, tensors_in
from kaitian_mpi.integrations.weighted_gradients import require_gradient, unweight_inputs
from kaitian_mpi.integrations.weights import Weights
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close

_UNSUPPORTED = {  # by a type's name
    "DataLoaderDispatcher": "dispatch_batches: set it to False",
    "DeepSpeedEngine": "DeepSpeed: use DistributedDataParallel",
    "FullyShardedDataParallel": "FSDP: use DistributedDataParallel",
    "FSDPState": "FSDP: use DistributedDataParallel",
    "IterableDatasetShard": "an IterableDataset: use a data set with a length and an index",
}
_NEEDS = (
    "it needs a DataLoader with torch's DistributedSampler over all ranks, or one that Accelerate "
    "has prepared, and a model in DistributedDataParallel"
)


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
        self._comm = world.comm.Dup()
        self._times = StepTimer(self._comm, world.device_kind)
        self._ranks = Ranks(world, self._comm, self._times.waiting)
        self._weights = Weights(self._ranks)
        self._trains_in_eval_mode = False  # whether a model has
        # A forward's rows for each of the batch's; 0 if its first dimension is others.
        self._ratios: weakref.WeakKeyDictionary[DistributedDataParallel, int] = (
            weakref.WeakKeyDictionary()
        )
        # By the rows of a rank's full batch in the script.
        self._plans: dict[int, AdaptivePlan] = {}
        self._cut: Cut | None = None  # of the loader that trains
        self._taken = TakenBatches()
        self._in_step: Taken | None = None  # of all forwards in the trainer's step, if it has one
        self._of_forward: Taken | None = None  # of the forward that is computed, if known
        self._now = self._in_forward = Given(1, world.size)
        self._sums = False  # whether the next backward sums the gradients
        self._restore = [cut_loaders(self), self._extend_ddp()]
        self._restore.append(register_optimizer_step_post_hook(self._check_supported).remove)
        register_close(self._receive_all)

    def close(self) -> None:
        """Take the extensions away again; loaders that have been cut stay equal. Collective."""
        while self._restore:
            self._restore.pop()()
        unregister_close(self._receive_all)
        self._receive_all()
        _installed.clear()

    def divide(self, cut: Cut, rows: int) -> list[int]:
        """Return how many rows of a batch each rank takes."""
        plan = self._plans.get(cut.rows) or AdaptivePlan(cut.rows, self.world.infos, min_batch=2)
        return plan.divide(rows)

    def is_training(self) -> bool:
        """Return whether a model is in training mode, such as before its first batch."""
        is_computed = self._trains_in_eval_mode and torch.is_grad_enabled()
        return is_computed or self._weights.is_training()

    def has_new_plan(self) -> bool:
        """Return whether the ranks' times of the last step have changed the plan. Collective."""
        times = self._times.receive()
        if times is None or self._cut is None:
            return False
        plan = self._plans[self._cut.rows]
        reason = plan.observe(times)
        if reason:
            print_rank_0(self.world, f"step {self._times.steps}: new plan {plan.shares}: {reason}")
        return bool(reason)

    def gives(self, iteration: Iteration, given: Given, batch: Any) -> None:
        """Take note that the script takes a batch."""
        self._taken.take(iteration, given, batch, self.is_training())

    def gives_uncut(self, is_stream: bool) -> None:
        """Take note that the script iterates over a loader that is not cut."""
        self._taken.take_uncut(self.is_training(), is_stream)

    @contextlib.contextmanager
    def step_of(self, inputs: Any) -> Iterator[Given | None]:
        """Let all forwards have the batch of these inputs, the next that its trainer has taken.

        The context gives the rows of that batch, or None if it is not known.
        """
        self._in_step = self._taken.train(inputs, in_order=True)
        try:
            yield self._in_step.given if self._in_step is not None else None
        finally:
            self._in_step = None

    def _extend_ddp(self) -> Callable[[], None]:
        """Watch every model that DDP wraps from now on; return what ends that."""
        create = DistributedDataParallel.__init__

        @functools.wraps(create)
        def create_and_watch(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            self._convert_norms(kwargs["module"] if "module" in kwargs else args[0])
            create(model, *args, **kwargs)
            self._weights.watch(model)
            count_rows_exactly(self.counts)
            if "transformers.trainer" in sys.modules:
                from kaitian_mpi.integrations.logged_losses import weight_losses

                weight_losses(self._weights, self.step_of)
            model.register_forward_pre_hook(_WatchBegin(), with_kwargs=True)
            model.register_forward_hook(_ForwardHook(), with_kwargs=True)
            model.register_forward_hook(_ForwardEnd(), always_call=True)

        def restore() -> None:
            DistributedDataParallel.__init__ = create  # type: ignore[method-assign]

        DistributedDataParallel.__init__ = create_and_watch  # type: ignore[assignment, method-assign]
        return restore

    def _convert_norms(self, module: nn.Module) -> None:
        """Make torch's `SyncBatchNorm`, which refuses CPUs, one that works on every device."""
        for norm in module.modules():
            if isinstance(norm, nn.SyncBatchNorm):
                convert_sync_batchnorm(norm, norm.process_group)
                participate(norm, _Rows(self))

    def counts(self) -> bool:
        """Return whether the rows of the forward that begins count, and are not a stand-in."""
        return self._in_forward.own > 0 or self._weights.counts_stand_ins

    def before_forward(
        self, model: DistributedDataParallel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Find out which batch a forward has, and return its inputs, for gradients to leave by.

        Collective when a loader is new, in training mode. In eval mode gradients may be computed or
        not, and a rank may be alone: the batch is one that is trained on if there is a backward.
        """
        inputs = args, kwargs
        if not (torch.is_grad_enabled() and model.module.training):
            self._of_forward = self._taken.evaluate(inputs)
            if self._of_forward is not None:
                self._in_forward = self._of_forward.given
        else:
            self._of_forward = self._in_step or self._taken.train(inputs)
            self._in_forward = self._train_on(self._of_forward, model)
        if not torch.is_grad_enabled():
            return None
        self._weights.begin_forward(model)
        return unweight_inputs(args, kwargs)

    def after_forward(
        self,
        model: DistributedDataParallel,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> Any:
        """Weight the gradients of a forward."""
        if not torch.is_grad_enabled():
            return None
        if not require_gradient(output):
            _check_output(model, output)
            return None
        rows = first_length(args, kwargs) or 0
        forward = Forward(functools.partial(self._count, self._of_forward, model, rows), rows)
        if model.module.training:
            forward.batch()
        inputs = args, dict(kwargs)
        return self._weights.weight_output(model, inputs, output, forward, self._backward_done)

    def end_forward(self) -> None:
        """Watch the forward no more, also where it has failed."""
        self._weights.end_forward()

    def _count(
        self, taken: Taken | None, model: DistributedDataParallel, rows: int
    ) -> tuple[Given, int]:
        """Return the batch of a forward with gradients, and how many rows that has for each.

        The second is as in the model's first forward; 0 if its first dimension is others.
        """
        self._trains_in_eval_mode |= not model.module.training
        given = self._train_on(taken, model)
        in_batch = max(given.own, 1)
        ratio = self._ratios.setdefault(model, 0 if rows % in_batch else rows // in_batch)
        self._times.batches += 1
        self._sums = model.require_backward_grad_sync
        return given, ratio

    def _train_on(self, taken: Taken | None, model: DistributedDataParallel) -> Given:
        """Let a batch be one that is trained on. Collective when its loader is new."""
        group: Any = model.process_group
        if taken is None or group.size() != self.size:
            raise _refusal(self._taken)
        if taken.iteration.cut is not self._cut:
            self._begin(taken.iteration.cut, model.module)
        if taken.given.is_padded:
            raise AgreedError(
                "--adaptive divides a partial batch that is the first one only if the model is in "
                "training mode before it is taken; call model.train() before the loop"
            )
        self._now = taken.given
        return taken.given

    def _begin(self, cut: Cut, model: nn.Module) -> None:
        """Let the plan follow the speed of the ranks on this loader's batches. Collective."""
        if cut.refusal:
            raise AgreedError(cut.refusal)
        cut.trains = True
        self._cut = cut
        if cut.rows in self._plans:
            return  # such as the loader of another epoch
        rows = self._ranks.gather_at("the first batch of a loader", cut.rows)
        if len(set(rows)) > 1:
            raise AgreedError(
                f"--adaptive divides the ranks' batches itself, which are {rows} rows now; "
                "give every rank the same batch size"
            )
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        own_statistics = any(not isinstance(m, SyncBatchNorm) for m in norms)
        self._plans[cut.rows] = AdaptivePlan(cut.rows, self.world.infos, 2 if own_statistics else 1)
        print_rank_0(
            self.world,
            f"adaptive: batches of {cut.rows * self.size} rows over {self.size} ranks follow the "
            "ranks' speed",
        )

    def _backward_done(self) -> None:
        """Mark when all gradients are computed; DDP's callback waits for the ranks after this."""
        if self._sums:
            self._sums = False
            self._times.computed()
            torch.autograd.Variable._execution_engine.queue_callback(self._summed)

    def _summed(self) -> None:
        self._times.summed(self._now.own)

    def _receive_all(self) -> None:
        self._times.receive()

    def _check_supported(self, *_: Any) -> None:
        """Refuse a trainer whose batches or gradients are not in our reach. Collective."""
        # Else it is a step of a preparation.
        if self._cut is None and self._taken.is_iterated:
            raise _refusal(self._taken)


class _Rows(Participation):
    """How a rank's rows take part in the statistics; their gradients are weighted already."""

    def __init__(self, adaptive: Adaptive) -> None:
        super().__init__()
        self._adaptive = adaptive

    @property
    def counts(self) -> bool:
        return self._adaptive.counts()


@not_compiled
class _WatchBegin:
    """A forward pre-hook; without a state of its own, so that a model can be copied and pickled."""

    def __call__(self, model: Any, args: Any, kwargs: Any) -> Any:
        return _installed[0].before_forward(model, args, kwargs) if _installed else None


@not_compiled
class _ForwardHook:
    """A forward hook; without a state of its own, so that a model can be copied and pickled."""

    def __call__(self, model: Any, args: Any, kwargs: Any, output: Any) -> Any:
        return _installed[0].after_forward(model, args, kwargs, output) if _installed else None


@not_compiled
class _ForwardEnd:
    """A forward hook that is called in any case; without a state of its own, as the others."""

    def __call__(self, *_: Any) -> None:
        if _installed:
            _installed[0].end_forward()


def _check_output(model: DistributedDataParallel, output: Any) -> None:
    """Refuse gradients through an output that has none as pytree sees it; there may be none."""
    if not any(parameter.requires_grad for parameter in model.module.parameters()):
        return
    error = AgreedError(
        f"--adaptive finds no tensor with a gradient in what the model returns "
        f"({type(output).__name__}); return tensors, or dicts, tuples or lists of them"
    )
    if model.module.training:
        raise error

    def refuse(_: torch.Tensor) -> None:
        raise error

    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(refuse)


def _refusal(taken: TakenBatches) -> AgreedError:
    """Return the error that says why the script's batches cannot be divided."""
    objects: list[Any] = gc.get_objects()
    kinds = {type(each).__name__ for each in objects}
    named = [text for name, text in _UNSUPPORTED.items() if name in kinds]
    if taken.reads_stream:
        named.insert(0, _UNSUPPORTED["IterableDatasetShard"])
    # A proxy says of itself what it stands for; its type does not.
    modules = (each for each in objects if issubclass(type(each), nn.Module))
    if any(is_lightning(each) and not each.automatic_optimization for each in modules):
        named.append("Lightning's manual optimization: leave out automatic_optimization=False")
    reason = f"it does not work with {named[0]}" if named else _NEEDS
    return AgreedError(f"--adaptive cannot divide this script's batches: {reason}")


_installed: list[Adaptive] = []


def install(world: World) -> Adaptive | None:
    """Make the batches of this process's trainer adaptive; does nothing in a job of one rank.

    Call it before the script creates its loaders and its model's `DistributedDataParallel`.
    Collective over all ranks. Called again, it returns the same.
    """
    if not _installed and world.size > 1:
        _installed.append(Adaptive(world))
    return _installed[0] if _installed else None
