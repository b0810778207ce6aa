"""The weights of this process's models: each gradient by the loss that it comes from."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi.distributed.data_parallel import first_length
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.integrations.inner_losses import InnerCall, InnerCalls
from kaitian_mpi.integrations.loss_graphs import rules_of_graph
from kaitian_mpi.integrations.loss_weights import Forward, ForwardWeight, Loss, Ranks
from kaitian_mpi.integrations.losses import (
    MEAN,
    Labels,
    find_rules,
    is_lightning,
    labels_in,
    loss_of,
)
from kaitian_mpi.integrations.weighted_gradients import depends_on_hidden_output, weight_output

_EXAMINED_FORWARDS = 2  # the second may be of the model's own output


class Weights:
    """What the gradients of the watched models' outputs are multiplied by.

    If a trainer's loss is known, it is that of all outputs. Else the loss that a model returns is
    compared, and a gradient through any other output is taken for that of a mean over rows. So is
    the loss of Lightning's `training_step`, which has effects, so that it cannot be compared,
    unless a model inside has returned it, or its graph tells that it is none.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Watch no model yet."""
        self.world = ranks.world
        self._ranks = ranks
        self._script_loss = Loss(ranks, rules=[MEAN])
        self._trainer_loss: Loss | None = None
        self._trainer_labels: Labels = {}
        self._returned: weakref.WeakKeyDictionary[DistributedDataParallel, Loss] = (
            weakref.WeakKeyDictionary()
        )
        self._of_steps: weakref.WeakKeyDictionary[DistributedDataParallel, Loss] = (
            weakref.WeakKeyDictionary()
        )
        self._examined: weakref.WeakKeyDictionary[DistributedDataParallel, int] = (
            weakref.WeakKeyDictionary()
        )
        self._inner = InnerCalls()
        self._latest: ForwardWeight | None = None

    def watch(self, model: DistributedDataParallel) -> None:
        """Know nothing yet of the loss that a model may return."""
        self._returned[model] = self.new_loss("model")
        self._of_steps[model] = Loss(self._ranks, "training_step", fallback=[MEAN])

    def is_training(self) -> bool:
        """Return whether a model is in training mode."""
        return any(model.module.training for model in self._returned)

    def new_loss(self, owner: str) -> Loss:
        """Return a loss that nothing is known of."""
        return Loss(self._ranks, owner)

    def set_trainer_loss(self, loss: Loss | None, labels: Labels) -> None:
        """Weight the coming forwards by the loss that a trainer computes; None: not known."""
        self._trainer_loss = loss
        self._trainer_labels = labels

    @property
    def counts_stand_ins(self) -> bool:
        """Return whether rows that are given again, for a rank to have a batch, are counted."""
        return self._trainer_loss is not None and self._trainer_loss.counts_stand_ins

    def latest(self) -> float:
        """Return what the gradient of the latest forward is multiplied by, on this rank."""
        return self._latest.factor if self._latest is not None else 1.0

    def begin_forward(self, model: DistributedDataParallel) -> None:
        """Take note that a forward with gradients begins, whose output will be weighted."""
        if is_lightning(model.module):
            self._inner.begin(model.module, collects=not self._of_steps[model].rules)

    def end_forward(self) -> None:
        """Watch the models inside no more; a forward that fails has no output to weight."""
        self._inner.end()

    def weight_output(
        self,
        model: DistributedDataParallel,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        output: Any,
        forward: Forward,
        backward_done: Callable[[], None],
    ) -> Any:
        """Return the output of a forward, through which gradients will flow weighted.

        Args:
            model: the model.
            inputs: its positional and keyword arguments.
            output: what it has returned.
            forward: its batch.
            backward_done: called when all gradients are computed, before DDP waits for other ranks.

        Raises:
            AgreedError: the output of another model went into this one unseen.
        """
        self._examine(model, output)
        returned, labels = loss_of(output), self._trainer_labels
        of_output = of_loss = self._trainer_loss or self._script_loss
        call: InnerCall | None = InnerCall(model.module, *inputs)
        has_own_loss = is_lightning(model.module)
        if has_own_loss:
            call = self._inner.end()
        if self._trainer_loss is None and returned is not None:
            if call is not None:
                of_loss, labels = self._returned[model], labels_in(call.args, call.kwargs)
                of_loss.observe(labels, functools.partial(find_rules, *call))
            elif has_own_loss and not model.static_graph:  # its graph is not to be used twice
                of_loss, rows = self._of_steps[model], first_length(*inputs) or 0
                outputs = self._inner.outputs
                of_loss.observe({}, lambda: rules_of_graph(returned, outputs, rows))
        weights = [
            ForwardWeight(forward, loss, labels, backward_done) for loss in (of_loss, of_output)
        ]
        self._latest = weights[1]
        return weight_output(output, returned, *weights)

    def _examine(self, model: DistributedDataParallel, output: Any) -> None:
        forwards = self._examined.get(model, 0)
        if forwards == _EXAMINED_FORWARDS:
            return
        self._examined[model] = forwards + 1
        if depends_on_hidden_output(output):
            raise AgreedError(
                "--adaptive cannot weight the ranks' gradients: a model's input was computed by "
                "another model, and is not seen among the arguments; pass tensors, or dicts, "
                "tuples or lists of them"
            )
