"""The forwards and backwards of models in a trainer whose batches are adaptive.

Each forward is of a batch that the script has taken from a loader (taken_batches.py). Its gradients
are weighted by the rows of that batch on this rank and on all of them, and when its backward has
ended, the ranks exchange their times.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.data_parallel import first_length
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.integrations.loader_plans import LoaderPlans
from kaitian_mpi.integrations.loss_weights import Backwards, Forward, Ranks
from kaitian_mpi.integrations.losses import is_lightning
from kaitian_mpi.integrations.output_weights import OutputWeights
from kaitian_mpi.integrations.step_timer import StepTimer
from kaitian_mpi.integrations.taken_batches import (
    BatchRows,
    TakenBatch,
    TakenBatches,
    tensors_in,
)
from kaitian_mpi.integrations.weighted_gradients import require_gradient, unweight_inputs

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
class WeightedForwards:
    """Weights the gradients of each forward, and times the steps that their backwards end."""

    def __init__(
        self,
        ranks: Ranks,
        weights: OutputWeights,
        plans: LoaderPlans,
        taken: TakenBatches,
        times: StepTimer,
    ) -> None:
        """Start before the first forward. Not collective.

        Args:
            ranks: adds up the ranks' numbers.
            weights: weights the gradients of what a model returns.
            plans: what a loader whose batches are trained on begins to follow.
            taken: the batches that the script has taken from loaders.
            times: exchanges the times of the steps.
        """
        self._ranks = ranks
        self._weights = weights
        self._plans = plans
        self._taken = taken
        self._times = times
        self._trains_in_eval_mode = False  # whether a model has
        # A forward's rows for each of the batch's; 0 if its first dimension is others.
        self._ratios: weakref.WeakKeyDictionary[DistributedDataParallel, int] = (
            weakref.WeakKeyDictionary()
        )
        self._step_batch: TakenBatch | None = None  # of all forwards in the trainer's current step
        self._forward_batch: TakenBatch | None = None  # of the forward that is computed, if known
        self._forward_rows = BatchRows(1, ranks.comm.size)
        # The latest batches of a forward with gradients, and of a backward.
        self._train_batch: TakenBatch | None = None
        self._trained_batch: TakenBatch | None = None
        self._next_backward_sums = False  # the gradients over the ranks
        self._is_in_backward = False  # in which gradients are summed
        self._backwards = Backwards(self._backward_begun, self._backward_done)

    def is_training(self) -> bool:
        """Return whether a model is in training mode, such as before its first batch."""
        is_computed = self._trains_in_eval_mode and torch.is_grad_enabled()
        return is_computed or self._weights.is_training()

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
                f"{self._ranks.world.rank}, and the script goes on, while the other ranks wait for "
                "its gradients; let the error end the job"
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
        if taken is None or group.size() != self._ranks.comm.size:
            raise _refusal(self._taken)
        self._plans.begin(taken.iteration.sampler, model.module)
        if taken.rows.is_padded:
            raise AgreedError(
                "--adaptive divides a partial batch that is the first one only if the model is in "
                "training mode before it is taken; call model.train() before the loop"
            )
        self._count_rows(taken)
        self._train_batch = taken
        return taken.rows

    def _count_rows(self, taken: TakenBatch) -> None:
        """Add up the ranks' rows of a batch from before its loader trained. Collective then."""
        if not taken.rows.all_ranks:
            taken.count_all(self._ranks.sum(taken.rows.this_rank))

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
        assert self._train_batch is not None
        self._times.summed(self._train_batch.rows.this_rank)

    def check_step(self, *_: Any) -> None:
        """Refuse the optimizer's step of a trainer whose batches cannot be reached. Collective."""
        # Without a loader, it is a step of a preparation.
        if not self._plans.has_begun and self._taken.is_iterated:
            raise _refusal(self._taken)


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
