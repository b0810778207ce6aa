"""Runs this rank's part of a pipeline: its layers, on its micro-batches, in its order.

The schedule is our own rather than one of `torch.distributed.pipelining`: that has one rank a stage
and micro-batches of one shape, all of it posted at once; here stages have unequal replicas, batches
are ragged, and each wait is one that the watchdog and the recovery know.
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
    answered,
    captured,
    has_custom_function,
    run,
)
from kaitian_mpi.train.layouts.pipeline.draws import equal_draws
from kaitian_mpi.train.layouts.pipeline.messages import Activations, Gradients, Outbox
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
        """Prepare to run; `begins` and `ends` are called around each forward and backward.

        Without `peers`, MPI carries all messages.
        `is_mixed` says whether stages are on devices of several kinds.
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
        stage, limits = stages[number], windows(stages, ahead)
        self._layers = layers[stage.begin : stage.end]
        self._window = limits[number]
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

    def own(self, count: int) -> list[int]:
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
        """Compute a step of so many micro-batches; the gradients add up in the parameters.

        If it `reads_batches`, this rank needs those that it computes, on its device. The last stage
        multiplies their mean losses with the weights, and returns these; others return none.
        `seeds`, the same on all ranks, are of the random numbers that the loss draws itself.
        """
        step = _Step(self, count, self._task.loss, batches, seeds)
        computation, losses = self._computation, list[torch.Tensor]()
        with computation.autocast():  # else each micro-batch would keep copies of the weights
            for is_forward, number in schedule(step.own, self._window):
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
        """Compute forwards only; yield each micro-batch with what `function` returns.

        `read` returns the batch of a micro-batch, on the device. Yields nothing except on ranks of
        the last stage.
        """
        step = _Step(self, count, function, {}, range(count))
        for number in step.own:
            if self.reads_batches:
                step.batches = {number: read(number)}
            output = step.forward(number)
            step.kept.clear()
            if self.is_last:
                yield number, output
        self._outbox.wait()


class _Step:
    """The micro-batches of a step that are under way on this rank."""

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
        self.own = runner.own(count)
        self._seeds = seeds
        stages, number = runner._stages, runner.number or 0
        self._sources = stages[number - 1].micro_batch_ranks(count) if number else []
        is_inner = not runner.is_last and runner.number is not None
        self._targets = stages[number + 1].micro_batch_ranks(count) if is_inner else []
        self._to_receive = [] if runner.is_first else list(self.own)
        self._incoming: dict[int, Activations] = {}
        self.kept: dict[int, tuple[list[torch.Tensor], Any]] = {}
        self._computes_again: bool | None = None
        self._gradients: dict[int, Gradients] = {}

    def forward(self, number: int) -> Any:
        """Compute a micro-batch; send it on, or return the function's result in the last stage."""
        runner = self._runner
        call = None
        carried = None
        task, leaves = runner._task, list[torch.Tensor]()
        if runner.needs_call:
            with self._draws(number, runner._is_mixed):
                call = captured(self._function, task.model, self.batches[number])
        if not runner.is_first:
            carried, leaves = self._receive(number)
        with runner._computation.autocast():
            output = run(runner._layers, call, carried)
            if runner.is_last:
                self.kept[number] = leaves, [t for t in tensors_in(output) if t.requires_grad]
                with self._draws(number):
                    return answered(self._function, task.model, self.batches[number], output)
        runner._ends()
        grown = runner._outbox.send_activations(output, self._targets[number], number)
        self.kept[number] = leaves, grown
        self._expect_gradients()
        return None

    @property
    def computes_again(self) -> bool:
        """Whether backward computes something that forward has computed without a gradient.

        As reentrant checkpointing does. In backward, the copies that autocast has made of weights
        then would lose their gradients.
        """
        if self._computes_again is None:
            _, outputs = next(iter(self.kept.values()))
            self._computes_again = has_custom_function(list(tensors_in(outputs)))
        return self._computes_again

    def keep_loss(self, number: int, loss: Any, weight: float) -> list[torch.Tensor]:
        """Keep a loss for its backward; return it weighted, if it counts."""
        loss, (leaves, outputs) = check_loss(loss), self.kept[number]
        if not weight:  # perhaps NaN: nothing but that there are gradients
            used = _used_by(loss, outputs)
            zeros = (output.sum() * 0 for output in used)
            self.kept[number] = leaves, sum(zeros, loss.new_zeros(()))
            return []
        self.kept[number] = leaves, loss * weight
        return [(loss * weight).detach()]

    def backward(self, number: int) -> None:
        """Compute a micro-batch's gradients, and send back those of what was received."""
        runner = self._runner
        leaves, outputs = self.kept.pop(number)
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

    def _draws(self, number: int, is_mixed: bool = False) -> AbstractContextManager[None]:
        return equal_draws(self._seeds[number], self._runner._computation.device, is_mixed)

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
        for number, (_, outputs) in () if self._runner.is_last else self.kept.items():
            if len(self._gradients) > _AHEAD:
                break
            if outputs and number not in self._gradients:
                source, peers = self._targets[number], self._runner._peers
                self._gradients[number] = Gradients(peers, outputs, source, number)

    def _wait(self, name: str, messages: Activations | Gradients) -> None:
        with nullcontext() if messages.is_completed() else self._runner._waits(name):
            messages.wait()  # raises what went wrong


def _used_by(loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of a model's outputs that a loss depends on."""
    if not (outputs and loss.requires_grad):
        return []
    # What is computed from one output may be another one, whose backward is still to come.
    options: Any = {"allow_unused": True, "retain_graph": True}
    gradients = torch.autograd.grad(loss, outputs, **options)
    pairs = zip(outputs, gradients, strict=True)
    return [output for output, gradient in pairs if gradient is not None]
