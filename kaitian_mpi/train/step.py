"""A global step: in progress, done, and what observes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from kaitian_mpi.devices import Device
from kaitian_mpi.distributed.gradients import Fraction
from kaitian_mpi.distributed.sync_batch_norm import Participation
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.data.batches import MicroBatch
from kaitian_mpi.train.step_times import StepClock, StepReports, StepTimes
from kaitian_mpi.train.task import Task

_BATCH_NORM = "the sums of a batch norm"


@dataclass(frozen=True)
class Step:
    """A global step that all ranks have done."""

    number: int
    """Counted from 1."""
    epoch: int
    """From 0."""
    samples: int
    """All ranks' samples."""
    batch_sizes: list[int]
    """Samples of each rank, which add up to `samples`."""
    mean_loss: torch.Tensor
    """The mean over the global batch, on the device; the same on all ranks."""
    rank_samples: int
    """This rank's samples."""
    is_finite: bool
    """Whether its gradient is finite; if not, all ranks have skipped the optimizer's step."""
    times: StepTimes
    """Times of the steps that the device has finished since the previous step."""
    data_sec: float
    """Time spent getting this rank's batch."""

    @property
    def loss(self) -> float:
        """The mean loss over the global batch; reading it waits for the device."""
        return float(self.mean_loss)

    def report(self, wants_checkpoint: bool = False) -> tuple[float, ...]:
        """Return this rank's report of the step for the other ranks."""
        times = self.times
        count = max(1, self.times.steps)
        work_sec = times.computed / count + self.data_sec
        wait_sec = times.waited / count
        return times.steps, self.rank_samples, work_sec, wait_sec, self.data_sec, wants_checkpoint


class StepObserver:
    """Follows the steps of a loop on its ranks; the methods do nothing here.

    The loop calls its observers in order. Every method is collective, unless stated otherwise.
    """

    def epoch_begins(self) -> None:
        """Prepare for an epoch, or for the rest of one. Not collective."""

    def wants_checkpoint(self) -> bool:
        """Return whether this rank requests a checkpoint after the step. Not collective."""
        return False

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        """Handle a step that all ranks have done, with the reports about the step before it."""

    def shares_dropped(self) -> None:
        """Handle that what was loaded ahead will be loaded again, on all ranks. Not collective."""

    def epoch_ends(self) -> None:
        """Handle the end of an epoch, before its evaluation."""

    def evaluated(self, means: Mapping[str, float], epoch: int) -> None:
        """Handle the evaluation at the end of an epoch, counted from 0: its means by name."""

    def close(self, together: bool) -> None:
        """End with the loop; if not `together`, no rank may be waited for: one may be lost."""

    def run_finished(self) -> None:
        """Handle the end of the run, after `close`."""


class StepInProgress(Participation):
    """The step that is being made: this rank's share of it, and its part in batch norms' sums."""

    def __init__(self, device: Device) -> None:
        super().__init__(lambda: self.rank_weight)
        self.clock = StepClock(device)
        self._pace = device.pace
        self.number = 0
        self.batch_sizes: list[int] = []
        self.samples = self.rank_samples = 0
        self.weights: Sequence[float] = ()
        """The weights of this rank's micro-batches: the number of terms of each one's mean."""
        self.rank_weight = 0.0
        self._fraction = Fraction(0.0, 0.0)
        self._losses: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []

    def begin(
        self, number: int, task: Task, micro_batches: Sequence[MicroBatch], batch_sizes: list[int]
    ) -> None:
        """Begin a step, counted from 1, with this rank's share. Collective."""
        rank_samples = sum(micro_batch.samples for micro_batch in micro_batches)
        self.begin_with_samples(number, batch_sizes, rank_samples)
        self.weights = [
            task.weight_of(micro_batch.batch, micro_batch.samples) if micro_batch.samples else 0
            for micro_batch in micro_batches
        ]
        self.rank_weight = sum(self.weights, 0.0)
        # The sum of the ranks' weights is known if these are their samples; else it starts here.
        total = self.samples if task.weight is None else None
        self._fraction = Fraction(self.rank_weight, total)

    def begin_with_samples(self, number: int, batch_sizes: list[int], rank_samples: int) -> None:
        """Begin a step, counted from 1, with this rank's number of samples and without weights."""
        self.number = number
        self._losses = []
        self._outputs = []
        self.batch_sizes = batch_sizes
        self.samples = sum(batch_sizes)
        self.rank_samples = rank_samples
        self.weights = ()
        self.rank_weight = float(rank_samples)

    def start_clock(self) -> None:
        """Begin the time of the step, perhaps again. Not collective."""
        self.clock.start()
        self._pace.start()

    def gradients_summed(self) -> None:
        """Mark on the device that the gradients are summed. Not collective."""
        self.clock.gradients_summed()
        self._pace.start()

    def stop_clock(self) -> StepTimes:
        """End the time of the step; return those of steps that the device has finished since."""
        self._pace.catch_up()
        self.clock.stop()
        return self.clock.take()

    def bucket_ready(self, is_last: bool) -> None:
        """Mark on the device that the gradients of a bucket are ready."""
        self._pace.catch_up()
        self.clock.gradients_ready()
        if is_last:
            enter_phase("the sum of gradients", step=self.number, waits=True)

    def weight_loss(self, loss: torch.Tensor, index: int) -> torch.Tensor:
        """Return a micro-batch's loss, weighted so that their sum is this rank's mean loss."""
        weight = self.weights[index]
        if self.rank_weight and not weight:
            return loss  # perhaps NaN; the caller makes a gradient of zero of it
        if weight != self.rank_weight:
            loss = loss * (weight / self.rank_weight)
        self._losses.append(loss.detach())
        return loss

    @property
    def weight_of_share(self) -> Callable[[], float] | None:
        """Return this rank's fraction of the global batch, once all ranks have begun.

        0 if none of its samples counts; None if it has no samples.
        """
        return self._fraction.value if self.rank_samples else None

    def weight_of_micro_batch(self, index: int) -> float | Callable[[], float] | None:
        """Return the factor of a micro-batch's weighted gradient in the sum over all ranks.

        0 for one of weight 0 beside others: its loss was not weighted.
        """
        return self.weight_of_share if self.weights[index] or not self.counts else 0.0

    def rank_loss(self) -> torch.Tensor:
        """Return the mean loss over this rank's share, once all its losses are weighted."""
        first, *others = self._losses
        return torch.stack(self._losses).sum() if others else first

    def mean_loss(self) -> torch.Tensor:
        """Return the mean over the global batch of the loss. Collective."""
        weight = self._fraction.value() if self.rank_samples else 0.0
        loss = self.rank_loss() * weight
        total = loss if weight else torch.zeros_like(loss)
        dist.all_reduce(total)
        return total

    @property
    def counts(self) -> bool:
        """Whether anything of this rank's share counts."""
        return self.rank_weight > 0

    @contextmanager
    def waits(self, phase: str = _BATCH_NORM) -> Iterator[None]:
        """Return the context of a sum within a step, which may wait for other ranks."""
        self._pace.catch_up()
        before = self.clock.enter(phase)
        if not before:  # between two steps
            yield
            return
        enter_phase(phase, step=self.number, waits=True)
        yield
        enter_phase("forward or backward", step=self.number)
        self.clock.enter(before)
        self._pace.start()

    def computed(self, output: torch.Tensor) -> None:
        """Remember an output of a share that does not count: its loss may have no gradient."""
        if not self.counts and output.requires_grad:
            self._outputs.append(output)

    def join_backward(self) -> None:
        """Join the other ranks' backward, if this rank's loss has no gradient. Collective."""
        outputs = self._outputs
        self._outputs = []
        if outputs:
            torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
