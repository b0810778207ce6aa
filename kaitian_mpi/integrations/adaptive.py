"""Adaptive batches in a script's own trainer: what `kaitian-run --adaptive` installs.

Every trainer passes three places of torch. A `DataLoader` gives each rank its planned slice of the
ranks' batches (planned_batches.py). `DistributedDataParallel` averages the ranks' gradients: each
is weighted by its slice on its way into the model (output_weights.py), so that the average is the
gradient of the global batch. When a backward has ended, the ranks exchange their times, and after
it they plan.
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
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.integrations.adaptive_plan import AdaptivePlan, StepTimer
from kaitian_mpi.integrations.forward_by_name import extend_forward, hook_by_name
from kaitian_mpi.integrations.lightning_means import count_rows_exactly
from kaitian_mpi.integrations.loss_weights import Backwards, Forward, Ranks
from kaitian_mpi.integrations.losses import is_lightning
from kaitian_mpi.integrations.output_weights import OutputWeights
from kaitian_mpi.integrations.planned_batches import PlannedBatchSampler
from kaitian_mpi.integrations.planned_loaders import plan_loaders
from kaitian_mpi.integrations.taken_batches import (
    BatchRows,
    Iteration,
    TakenBatch,
    TakenBatches,
    tensors_in,
)
from kaitian_mpi.integrations.weighted_gradients import require_gradient, unweight_inputs
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close

_UNSUPPORTED = {  # by a type's name
    "DataLoaderDispatcher": "dispatch_batches: set it to False",
    "DeepSpeedEngine": "DeepSpeed: use DistributedDataParallel",
    "FullyShardedDataParallel": "FSDP: use DistributedDataParallel",
    "FSDPState": "FSDP: use DistributedDataParallel",
}
_STREAM = (
    "this loader of an IterableDataset: give the DataLoader a batch_size, and no IterDataPipe or "
    "in_order=False"
)
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
        self._weights = OutputWeights(self._ranks)
        self._trains_in_eval_mode = False  # whether a model has
        # A forward's rows for each of the batch's; 0 if its first dimension is others.
        self._ratios: weakref.WeakKeyDictionary[DistributedDataParallel, int] = (
            weakref.WeakKeyDictionary()
        )
        self._said: set[str] = set()
        # By the rows of a rank's full batch in the script.
        self._plans: dict[int, AdaptivePlan] = {}
        self._train_sampler: PlannedBatchSampler | None = None  # of the loader that trains
        self._taken = TakenBatches()
        self._step_batch: TakenBatch | None = None  # of all forwards in the trainer's current step
        self._forward_batch: TakenBatch | None = None  # of the forward that is computed, if known
        self._train_rows = self._forward_rows = BatchRows(1, world.size)
        # The latest batches of a forward with gradients, and of a backward.
        self._train_batch: TakenBatch | None = None
        self._trained_batch: TakenBatch | None = None
        self._next_backward_sums = False  # the gradients over the ranks
        self._is_in_backward = False  # in which gradients are summed
        self._backwards = Backwards(self._backward_begun, self._backward_done)
        self._restore = [plan_loaders(self), self._extend_ddp()]
        self._restore.append(register_optimizer_step_post_hook(self._check_supported).remove)
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
        plan = self._plans.get(sampler.rank_rows)
        return plan or AdaptivePlan(sampler.rank_rows, self.world.infos, min_batch=2)

    def gather_numbers(self, number: int) -> list[int]:
        """Return every rank's number. Collective."""
        return self._ranks.gather_numbers(number)

    def say(self, text: str) -> None:
        """Print a line on rank 0, once. Not collective."""
        if text not in self._said:
            self._said.add(text)
            print_rank_0(self.world, text)

    def is_training(self) -> bool:
        """Return whether a model is in training mode, such as before its first batch."""
        is_computed = self._trains_in_eval_mode and torch.is_grad_enabled()
        return is_computed or self._weights.is_training()

    def has_new_plan(self) -> bool:
        """Return whether the ranks' times of the last step have changed the plan. Collective."""
        times = self._times.receive()
        if times is None or self._train_sampler is None:
            return False
        plan = self._plans[self._train_sampler.rank_rows]
        reason = plan.observe(times)
        if reason:
            print_rank_0(self.world, f"step {self._times.steps}: new plan {plan.shares}: {reason}")
        return bool(reason)

    def batch_taken(self, iteration: Iteration, rows: BatchRows, batch: Any) -> None:
        """Record that the script has taken a batch."""
        self._taken.take(iteration, rows, batch, self.is_training())

    def unplanned_loader_iterated(self, is_stream: bool) -> None:
        """Record that the script iterates over a loader that does not follow the plan."""
        self._taken.add_unplanned_loader(self.is_training(), is_stream)

    @contextlib.contextmanager
    def step_of(self, inputs: Any) -> Iterator[BatchRows | None]:
        """Attribute all forwards in the block to these inputs' batch, the trainer's next one.

        Yields the rows of that batch, or None if it is not known.
        """
        self._step_batch = self._taken.train(inputs, in_order=True)
        if self._step_batch is not None:
            self._count_rows(self._step_batch)
        try:
            yield self._step_batch.rows if self._step_batch is not None else None
        finally:
            self._step_batch = None

    def _extend_ddp(self) -> Callable[[], None]:
        """Watch every model that DDP wraps from now on; return a function that undoes this."""
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
                participate(norm, _Rows(self))

    def counts(self) -> bool:
        """Return whether the rows of the forward that begins count, and are not a stand-in."""
        return self._forward_rows.this_rank > 0 or self._weights.counts_stand_ins

    def before_forward(
        self, model: DistributedDataParallel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Find the batch of a forward, and return its inputs, through which gradients may leave.

        Collective when a loader is new, in training mode. In eval mode gradients may be computed or
        not, and a rank may be alone: the batch counts as training data if there is a backward.

        Raises:
            UserError: the last backward has failed, in which the other ranks wait for this one.
        """
        if self._is_in_backward and torch._C._current_graph_task_id() == -1:
            raise UserError(
                f"--adaptive: the backward of step {self._times.steps + 1} has failed on rank "
                f"{self.rank}, and the script goes on, while the other ranks wait for its "
                "gradients; let the error end the job"
            )
        inputs = args, kwargs
        if not (torch.is_grad_enabled() and model.module.training):
            self._forward_batch = self._taken.evaluate(inputs)
            if self._forward_batch is not None:
                self._forward_rows = self._forward_batch.rows
        else:
            self._forward_batch = self._step_batch or self._taken.train(inputs)
            self._forward_rows = self._train_on(self._forward_batch, model)
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
        forward = Forward(functools.partial(self._count, self._forward_batch, model, rows), rows)
        if model.module.training:
            forward.batch()
        inputs = args, dict(kwargs)
        return self._weights.weight_output(model, inputs, output, forward, self._backwards)

    def end_forward(self) -> None:
        """Stop watching the forward, even if it has failed."""
        self._weights.end_forward()

    def _count(
        self, taken: TakenBatch | None, model: DistributedDataParallel, rows: int
    ) -> tuple[BatchRows, int]:
        """Return the rows of a forward with gradients, and the input's length for each of them.

        The latter as in the model's first forward; 0 if the first dimension is not the batch.
        """
        self._trains_in_eval_mode |= not model.module.training
        batch_rows = self._train_on(taken, model)
        in_batch = max(batch_rows.this_rank, 1)
        ratio = self._ratios.setdefault(model, 0 if rows % in_batch else rows // in_batch)
        self._times.add_batch()
        self._next_backward_sums = model.require_backward_grad_sync
        return batch_rows, ratio

    def _train_on(self, taken: TakenBatch | None, model: DistributedDataParallel) -> BatchRows:
        """Count a batch as training data; return its rows. Collective when its loader is new."""
        group: Any = model.process_group
        if taken is None or group.size() != self.size:
            raise _refusal(self._taken)
        if taken.iteration.sampler is not self._train_sampler:
            self._begin(taken.iteration.sampler, model.module)
        if taken.rows.is_padded:
            raise AgreedError(
                "--adaptive divides a partial batch that is the first one only if the model is in "
                "training mode before it is taken; call model.train() before the loop"
            )
        self._count_rows(taken)
        self._train_batch = taken
        self._train_rows = taken.rows
        return taken.rows

    def _count_rows(self, taken: TakenBatch) -> None:
        """Add up the ranks' rows of a batch from before its loader trained. Collective then."""
        if not taken.rows.all_ranks:
            taken.count_all(self._ranks.sum(taken.rows.this_rank))

    def _begin(self, sampler: PlannedBatchSampler, model: nn.Module) -> None:
        """Make this loader's batches follow the ranks' speed. Collective."""
        if sampler.refusal:
            raise AgreedError(sampler.refusal)
        sampler.begin_training()
        self._train_sampler = sampler
        if sampler.rank_rows in self._plans and not sampler.may_end_early:
            return  # such as the loader of another epoch
        rows = self._ranks.gather_at(sampler.position(), sampler.rank_rows)
        if sampler.rank_rows in self._plans:
            return
        if len(set(rows)) > 1:
            raise AgreedError(
                f"--adaptive divides the ranks' batches itself, which are {rows} rows now; "
                "give every rank the same batch size"
            )
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        is_synchronized = all(isinstance(norm, SyncBatchNorm) for norm in norms)
        min_batch = 1 if is_synchronized else 2
        self._plans[sampler.rank_rows] = AdaptivePlan(
            sampler.rank_rows, self.world.infos, min_batch
        )
        print_rank_0(
            self.world,
            f"adaptive: batches of {sampler.rank_rows * self.size} rows over {self.size} ranks "
            "follow the ranks' speed",
        )

    def _backward_begun(self) -> None:
        self._is_in_backward |= self._next_backward_sums

    def _backward_done(self) -> None:
        """Mark when all gradients are computed; DDP's callback waits for the ranks after this."""
        self._is_in_backward = False
        if self._train_batch is not None and self._train_batch is not self._trained_batch:
            self._trained_batch = self._train_batch
            self._times.batch_trained(self._train_batch.number_in_epoch)
        if self._next_backward_sums:
            self._next_backward_sums = False
            self._times.computed()
            torch.autograd.Variable._execution_engine.queue_callback(self._summed)

    def _summed(self) -> None:
        self._times.summed(self._train_rows.this_rank)

    def _receive_all(self) -> None:
        self._times.receive()

    def _check_supported(self, *_: Any) -> None:
        """Refuse a trainer whose batches or gradients cannot be reached. Collective."""
        # Without a loader, it is a step of a preparation.
        if self._train_sampler is None and self._taken.is_iterated:
            raise _refusal(self._taken)


class _Rows(Participation):
    """Whether a rank's rows count in the statistics; their gradients are weighted already."""

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
    type_names = {type(value).__name__ for value in objects}
    unsupported = [text for name, text in _UNSUPPORTED.items() if name in type_names]
    if taken.reads_stream:
        unsupported.append(_STREAM)
    # By type, as a proxy answers for the object that it stands for.
    modules = (value for value in objects if issubclass(type(value), nn.Module))
    if any(is_lightning(module) and not module.automatic_optimization for module in modules):
        unsupported.append(
            "Lightning's manual optimization: leave out automatic_optimization=False"
        )
    reason = f"it does not work with {unsupported[0]}" if unsupported else _NEEDS
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
