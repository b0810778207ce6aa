"""The weights of the gradients of models' outputs, each by the loss that it comes from."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi.distributed.data_parallel import first_length
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.integrations.inner_losses import InnerCall, InnerCalls
from kaitian_mpi.integrations.loss_graphs import rules_of_graph
from kaitian_mpi.integrations.loss_weights import Backwards, Forward, ForwardWeight, Loss, Ranks
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


class OutputWeights:
    """The factors of the gradients of the watched models' outputs.

    If a trainer's loss is known, its rule applies to all outputs. Else the loss that a model
    returns is compared, and a gradient through any other output is assumed to be that of a mean
    over rows. So is that of the loss of Lightning's `training_step`, which cannot be compared as it
    has side effects, unless an inner model has returned it, or its graph shows another rule.
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
        """Begin to watch a model, without knowledge of the loss that it may return."""
        self._returned[model] = self.new_loss("model")
        self._of_steps[model] = Loss(self._ranks, "training_step", fallback=[MEAN])

    def is_training(self) -> bool:
        """Return whether a model is in training mode."""
        return any(model.module.training for model in self._returned)

    def new_loss(self, owner: str) -> Loss:
        """Return a loss of which no rule is known yet."""
        return Loss(self._ranks, owner)

    def set_trainer_loss(self, loss: Loss | None, labels: Labels) -> None:
        """Weight the next forwards by the loss that a trainer computes; None if unknown."""
        self._trainer_loss = loss
        self._trainer_labels = labels

    @property
    def counts_stand_ins(self) -> bool:
        """Whether stand-in rows count, which a rank has only to have a batch."""
        return self._trainer_loss is not None and self._trainer_loss.counts_stand_ins

    def latest(self) -> float:
        """Return the factor of the latest forward's gradient on this rank."""
        return self._latest.factor if self._latest is not None else 1.0

    def begin_forward(self, model: DistributedDataParallel) -> None:
        """Begin a forward with gradients, whose output will be weighted."""
        if is_lightning(model.module):
            self._inner.begin(model.module, collects=not self._of_steps[model].rules)

    def end_forward(self) -> None:
        """Stop watching inner models; a forward that fails has no output to weight."""
        self._inner.end()

    def weight_output(
        self,
        model: DistributedDataParallel,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        output: Any,
        forward: Forward,
        backwards: Backwards,
    ) -> Any:
        """Return the output of a forward, with weighted gradients.

        Args:
            model: the model.
            inputs: its positional and keyword arguments.
            output: its output.
            forward: its batch.
            backwards: what is called as its backward goes on.

        Raises:
            AgreedError: this model's input was computed by another model in a hidden way.
        """
        self._examine(model, output)
        returned = loss_of(output)
        labels = self._trainer_labels
        output_loss = returned_loss = self._trainer_loss or self._script_loss
        call: InnerCall | None = InnerCall(model.module, *inputs)
        is_training_step = is_lightning(model.module)
        if is_training_step:
            call = self._inner.end()
        if self._trainer_loss is None and returned is not None:
            if call is not None:
                returned_loss = self._returned[model]
                labels = labels_in(call.args, call.kwargs)
                returned_loss.observe(labels, functools.partial(find_rules, *call))
            elif is_training_step and not model.static_graph:  # such a graph can be used only once
                returned_loss = self._of_steps[model]
                rows = first_length(*inputs) or 0
                outputs = self._inner.outputs
                returned_loss.observe({}, lambda: rules_of_graph(returned, outputs, rows))
        returned_weight = ForwardWeight(forward, returned_loss, labels, backwards)
        self._latest = ForwardWeight(forward, output_loss, labels, backwards)
        return weight_output(output, returned, returned_weight, self._latest)

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
