"""Runs this rank's part of a pipeline: its layers, on its micro-batches, in its order.

The schedule is not one of `torch.distributed.pipelining`, which requires one rank per stage and
micro-batches of one shape, and posts all messages at once. Here stages have unequal replicas,
batches are ragged, and the watchdog and the recovery know of each wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from kaitian_mpi.balance.pipeline import Stage, schedule, windows
from kaitian_mpi.observe.tensor_files import tensors_in
from kaitian_mpi.runtime.polling import WaitContext
from kaitian_mpi.train.layouts.peers import PeerGroups
from kaitian_mpi.train.layouts.pipeline.chain import (
    all_need_call,
    capture_call,
    has_custom_function,
    run,
    run_with_output,
)
from kaitian_mpi.train.layouts.pipeline.messages import Activations, Gradients, Outbox
from kaitian_mpi.train.layouts.pipeline.random_numbers import same_random_numbers
from kaitian_mpi.train.task import Computation, Task, check_loss

_AHEAD = 2  # micro-batches whose messages are received while an earlier one is computed


class Runner:
    """This rank's layers of a pipeline; none on a rank without a stage."""

    def __init__(
        self,
        task: Task,
        layers: Sequence[nn.Module],
        computation: Computation,
        stages: Sequence[Stage],
        rank: int,
        ahead: int,
        *,
        waits: WaitContext,
        peers: PeerGroups | None = None,
        is_mixed: bool = False,
        begins: Callable[[bool], None] = lambda is_forward: None,
        ends: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to run. Not collective.

        Args:
            task: whose loss is computed.
            layers: all layers of the model.
            computation: this rank's device and precision.
            stages: of the plan.
            rank: this rank.
            ahead: see `windows`.
            waits: makes the context of a wait for other ranks.
            peers: carry messages between devices of a kind; None: MPI carries all.
            is_mixed: whether stages are on devices of several kinds.
            begins: called before each forward (with True) and backward (with False).
            ends: called after each forward and backward.
        """
        self._task = task
        self._computation = computation
        self._stages = stages
        self._rank = rank
        self._waits = waits
        self._begins = begins
        self._ends = ends
        self._is_mixed = is_mixed
        self.number = next((n for n, stage in enumerate(stages) if rank in stage.ranks), None)
        number = self.number if self.number is not None else 0
        stage = stages[number]
        self._layers = layers[stage.begin : stage.end]
        self._window = windows(stages, ahead)[number]
        self.needs_call = self.is_first or all_need_call(layers)
        self._peers = peers or PeerGroups(rank, computation.device)
        self._outbox = Outbox(waits, self._peers)

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.number == len(self._stages) - 1

    @property
    def reads_batches(self) -> bool:
        """Whether this rank needs the samples of its micro-batches."""
        return self.needs_call or self.is_last

    def rank_numbers(self, count: int) -> list[int]:
        """Return the numbers of the micro-batches that this rank computes, of `count`."""
        if self.number is None:
            return []
        ranks = self._stages[self.number].micro_batch_ranks(count)
        return [number for number, assigned in enumerate(ranks) if assigned == self._rank]

    def train(
        self,
        count: int,
        batches: Mapping[int, Any],
        weights: Mapping[int, float],
        seeds: Sequence[int],
    ) -> list[torch.Tensor]:
        """Compute a step's gradients, which add up in the parameters. Collective.

        Args:
            count: the number of micro-batches of all ranks.
            batches: this rank's micro-batches by number, on its device, if it `reads_batches`.
            weights: the factors of these micro-batches' mean losses.
            seeds: by micro-batch, for the random numbers that the loss draws; the same on all
                ranks.

        Returns:
            The weighted losses on ranks of the last stage; [] on others.
        """
        step = _MicroBatches(self, count, self._task.loss, batches, seeds)
        computation = self._computation
        losses: list[torch.Tensor] = []
        # One context for all, as otherwise each micro-batch would keep its copies of the weights.
        with computation.autocast():
            for is_forward, number in schedule(step.numbers, self._window):
                self._begins(is_forward)
                output = step.forward(number) if is_forward else None
                with computation.own_precision():
                    if not is_forward:
                        step.backward(number)
                    elif self.is_last:
                        losses += step.keep_loss(number, output, weights[number])
                if computation.has_autocast and step.computes_again:
                    torch.clear_autocast_cache()
        self._outbox.wait()
        return losses

    @torch.no_grad()
    def evaluate(
        self, function: Callable[[Any, Any], Any], count: int, read: Callable[[int], Any]
    ) -> Iterator[tuple[int, Any]]:
        """Compute forwards only; yield each micro-batch with what `function` returns. Collective.

        `read` returns the batch of a micro-batch, on the device. Yields nothing except on ranks of
        the last stage.
        """
        step = _MicroBatches(self, count, function, {}, range(count))
        for number in step.numbers:
            if self.reads_batches:
                step.batches = {number: read(number)}
            output = step.forward(number)
            step.graphs.clear()
            if self.is_last:
                yield number, output
        self._outbox.wait()


class _MicroBatches:
    """The micro-batches of a step that this rank is computing."""

    def __init__(
        self,
        runner: Runner,
        count: int,
        function: Any,
        batches: Mapping[int, Any],
        seeds: Sequence[int],
    ) -> None:
        self._runner = runner
        self._function = function
        self.batches = batches
        self.numbers = runner.rank_numbers(count)
        self._seeds = seeds
        stages = runner._stages
        number = runner.number or 0
        self._sources = stages[number - 1].micro_batch_ranks(count) if number else []
        has_next = not runner.is_last and runner.number is not None
        self._targets = stages[number + 1].micro_batch_ranks(count) if has_next else []
        self._to_receive = [] if runner.is_first else list(self.numbers)
        self._incoming: dict[int, Activations] = {}
        self.graphs: dict[int, tuple[list[torch.Tensor], Any]] = {}
        """By micro-batch that waits for its backward: the received activations, and the outputs
        that require gradients; in the last stage, the loss in place of these once it is known."""
        self._computes_again: bool | None = None
        self._gradients: dict[int, Gradients] = {}

    def forward(self, number: int) -> Any:
        """Compute a micro-batch; send it on, or return the function's result in the last stage."""
        runner = self._runner
        task = runner._task
        call = None
        carried = None
        leaves: list[torch.Tensor] = []
        if runner.needs_call:
            with self._random_numbers(number, runner._is_mixed):
                call = capture_call(self._function, task.model, self.batches[number])
        if not runner.is_first:
            carried, leaves = self._receive(number)
        with runner._computation.autocast():
            output = run(runner._layers, call, carried)
            if runner.is_last:
                outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
                self.graphs[number] = leaves, outputs
                with self._random_numbers(number):
                    return run_with_output(self._function, task.model, self.batches[number], output)
        runner._ends()
        sent = runner._outbox.send_activations(output, self._targets[number], number)
        self.graphs[number] = leaves, sent
        self._expect_gradients()
        return None

    @property
    def computes_again(self) -> bool:
        """Whether backward computes something again that forward computed without a gradient.

        Reentrant checkpointing does. The copies of weights that autocast made in the forward have
        no gradients, so backward must not use them.
        """
        if self._computes_again is None:
            _, outputs = next(iter(self.graphs.values()))
            self._computes_again = has_custom_function(list(tensors_in(outputs)))
        return self._computes_again

    def keep_loss(self, number: int, loss: Any, weight: float) -> list[torch.Tensor]:
        """Keep a micro-batch's loss for its backward; return it weighted, if it counts."""
        loss = check_loss(loss)
        leaves, outputs = self.graphs[number]
        if not weight:
            # The loss does not count and may be NaN, but the same parameters must get gradients.
            zeros = (output.sum() * 0 for output in _used_by(loss, outputs))
            self.graphs[number] = leaves, sum(zeros, loss.new_zeros(()))
            return []
        self.graphs[number] = leaves, loss * weight
        return [(loss * weight).detach()]

    def backward(self, number: int) -> None:
        """Compute a micro-batch's gradients; send back those of the received activations."""
        runner = self._runner
        leaves, outputs = self.graphs.pop(number)
        if runner.is_last:
            if outputs.requires_grad:
                runner._computation.scaler.scale(outputs).backward()
        elif outputs:
            gradients = self._gradients.pop(number)
            self._wait("gradients of the next stage", gradients)
            gradients.backward()
        runner._ends()
        self._expect_gradients()
        if leaves:
            runner._outbox.send_gradients(leaves, self._sources[number], number)

    def _random_numbers(self, number: int, is_mixed: bool = False) -> AbstractContextManager[None]:
        return same_random_numbers(self._seeds[number], self._runner._computation.device, is_mixed)

    def _receive(self, number: int) -> tuple[Any, list[torch.Tensor]]:
        runner = self._runner
        device = runner._computation.device
        while self._to_receive and len(self._incoming) <= _AHEAD:
            expected = self._to_receive.pop(0)
            source = self._sources[expected]
            self._incoming[expected] = Activations(runner._peers, source, expected, device)
        for incoming in self._incoming.values():
            if not incoming.post():
                break
        incoming = self._incoming.pop(number)
        self._wait("activations of the stage before", incoming)
        return incoming.take()

    def _expect_gradients(self) -> None:
        """Post the receives of the gradients that come next."""
        if self._runner.is_last:
            return
        for number, (_, outputs) in self.graphs.items():
            if len(self._gradients) > _AHEAD:
                break
            if outputs and number not in self._gradients:
                source = self._targets[number]
                self._gradients[number] = Gradients(self._runner._peers, outputs, source, number)

    def _wait(self, name: str, messages: Activations | Gradients) -> None:
        with nullcontext() if messages.is_completed() else self._runner._waits(name):
            messages.wait()  # raises the error of a failed message


def _used_by(loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of a model's outputs that a loss depends on."""
    if not (outputs and loss.requires_grad):
        return []
    # The graph is kept: the backward of some outputs is still to come.
    options: Any = {"allow_unused": True, "retain_graph": True}
    gradients = torch.autograd.grad(loss, outputs, **options)
    pairs = zip(outputs, gradients, strict=True)
    return [output for output, gradient in pairs if gradient is not None]
