"""A global step: in progress, done, what the ranks report of it, and what observes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from kaitian_mpi.devices.pace import Pace
from kaitian_mpi.distributed.sums import Fraction
from kaitian_mpi.distributed.sync_batch_norm import Participation
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.runtime.polling import keep_alive, wait_request
from kaitian_mpi.runtime.ulfm import is_revoked, track_comm
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.clock import StepClock, StepTimes
from kaitian_mpi.train.data.batches import MicroBatch
from kaitian_mpi.train.evaluation import Evaluation
from kaitian_mpi.train.task import Task

if TYPE_CHECKING:
    from mpi4py import MPI


class StepReport(NamedTuple):
    """What a rank reports to all others about a step. Each field is sent as one float64."""

    samples: int
    """The rank's samples in the step."""
    timed_steps: int
    """The number of steps that its device has finished since the last report."""
    computed_sec: float
    """Compute time of these steps, without waiting."""
    waited_sec: float
    """Time these steps spent waiting for communication."""
    data_sec: float
    """Time spent getting the step's batch."""
    wants_checkpoint: bool = False
    """Whether the rank requests a checkpoint."""


class StepReports:
    """All ranks' reports about a step, as arrays with one entry per rank."""

    def __init__(self, rows: np.ndarray) -> None:
        """Take the reports of ranks 0, 1, … as numbers, [ranks, fields]."""
        self.samples, self.timed_steps = rows[:, :2].astype(int).T
        self.computed_sec, self.waited_sec, self.data_sec = rows[:, 2:5].T
        self.wants_checkpoint = rows[:, 5].astype(bool)

    @classmethod
    def of(cls, reports: Sequence[StepReport]) -> StepReports:
        """Return the reports of ranks 0, 1, … as arrays."""
        return cls(np.array(reports, dtype=float))


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
    own_samples: int
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

    def report(self, wants_checkpoint: bool = False) -> StepReport:
        """Return the report of this step for the other ranks."""
        steps, computed, waited = self.times
        return StepReport(
            self.own_samples, steps, computed, waited, self.data_sec, wants_checkpoint
        )


class StepObserver:
    """Follows the steps of a loop on its ranks; the methods do nothing here.

    The loop calls its observers in order. Every method is collective, unless stated otherwise.
    """

    def epoch_begins(self) -> None:
        """Prepare for an epoch, or for the rest of one. Not collective."""

    def step_begins(self, number: int) -> None:
        """Prepare for a step, counted from 1. Not collective."""

    def wants_checkpoint(self) -> bool:
        """Return whether this rank requests a checkpoint. Not collective."""
        return False

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        """Handle a step that all ranks have done, with the reports about the step before it."""

    def epoch_ends(self) -> None:
        """Handle the end of an epoch, before its evaluation."""

    def evaluated(self, result: Evaluation, epoch: int) -> None:
        """Handle the evaluation at the end of an epoch, counted from 0."""

    def close(self, together: bool) -> None:
        """End with the loop; if not `together`, no rank may be waited for: one may be lost."""

    def run_finished(self) -> None:
        """Handle the end of the run, after `close`."""


class StepInProgress:
    """What is known of a step while it is made."""

    def __init__(self, data_sec: float = 0.0) -> None:
        self.data_sec = data_sec
        self.samples = 0
        """All ranks' samples."""
        self.batch_sizes: list[int] = []
        """Samples of each rank."""
        self.own_samples = 0
        self.weights: Sequence[float] = ()
        """Of this rank's micro-batches: how many terms the mean of each is over."""
        self.own_weight = 0.0
        self._fraction = Fraction(0.0, 0.0)
        self._losses: list[torch.Tensor] = []

    def begin(self, task: Task, parts: Sequence[MicroBatch], batch_sizes: list[int]) -> None:
        """Begin with this rank's share."""
        self.batch_sizes, self.samples = batch_sizes, sum(batch_sizes)
        self.own_samples = sum(part.samples for part in parts)
        self.weights = [
            task.weigh(part.batch, part.samples) if part.samples else 0 for part in parts
        ]
        self.own_weight = sum(self.weights, 0.0)
        self._fraction = Fraction(self.own_weight, self.samples)

    def sum_weights(self) -> None:
        """Start to sum the ranks' weights, if they are not their samples. Collective."""
        self._fraction = Fraction(self.own_weight)

    def weigh(self, loss: torch.Tensor, index: int) -> torch.Tensor:
        """Return what a micro-batch adds to the mean loss over this rank's share."""
        weight = self.weights[index]
        if self.own_weight and not weight:
            return loss  # perhaps NaN; the caller makes a gradient of zero of it
        if weight != self.own_weight:
            loss = loss * (weight / self.own_weight)
        self._losses.append(loss.detach())
        return loss

    @property
    def weight_of_share(self) -> Callable[[], float] | None:
        """Returns this rank's fraction of the global batch, once all ranks have begun.

        0 if none of its samples counts; None if it has no samples.
        """
        return self._fraction.value if self.own_samples else None

    def own_loss(self) -> torch.Tensor:
        """Return the mean loss over this rank's share, once all of it is weighed."""
        first, *others = self._losses
        return torch.stack(self._losses).sum() if others else first

    def mean_loss(self) -> torch.Tensor:
        """Return the mean over the global batch of the loss. Collective."""
        weight = self._fraction.value() if self.own_samples else 0.0
        own = self.own_loss() * weight
        total = own if weight else torch.zeros_like(own)
        dist.all_reduce(total)
        return total


class StepExchange:
    """Gathers every rank's report of a step while the next step is computed."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Duplicate the communicator. Collective over `comm`, as is every method."""
        self._comm = track_comm(comm.Dup())
        self._own = np.empty(len(StepReport._fields))
        self._gathered = np.empty((comm.size, len(StepReport._fields)))
        self._request: MPI.Request | None = None
        register_close(self.close)

    def swap(self, report: StepReport) -> StepReports | None:
        """Start sending this step's report; return all of the step before, or None in the first."""
        previous = self._receive()
        self._own[:] = report
        self._request = self._comm.Iallgather(self._own, self._gathered)
        return previous

    def close(self, together: bool = True) -> None:
        """End the exchange; without waiting, if not `together`: a rank may be lost."""
        unregister_close(self.close)
        if together and not is_revoked(self._comm):
            self._receive()
            self._comm.Free()
        elif self._request is not None:
            keep_alive(self._request, self._own, self._gathered)

    def _receive(self) -> StepReports | None:
        if self._request is None:
            return None
        wait_request(self._request)
        self._request = None
        return StepReports(self._gathered.copy())


class StepParticipation(Participation):
    """Takes part with what counts of the step's share, and counts waiting as waiting."""

    def __init__(self, clock: StepClock, pace: Pace, step: Callable[[], StepInProgress]) -> None:
        super().__init__(lambda: step().own_weight)
        self._clock, self._pace, self._step = clock, pace, step
        self._number = 0
        self._outputs: list[torch.Tensor] = []

    @property
    def counts(self) -> bool:
        """Whether anything of this rank's share counts."""
        return self._step().own_weight > 0

    def begin_step(self, number: int) -> None:
        """Begin a step, counted from 1."""
        self._number, self._outputs = number, []

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Return the context of a collective, which may wait for other ranks."""
        self._pace.catch_up()
        began = self._clock.wait_begins()
        enter_phase("the sums of a batch norm", step=self._number, waits=True)
        yield
        enter_phase("forward or backward", step=self._number)
        self._clock.wait_ends(began)
        self._pace.start()

    def computed(self, output: torch.Tensor) -> None:
        """Remember an output of a share that does not count: its loss may have no gradient."""
        if not self.counts and output.requires_grad:
            self._outputs.append(output)

    def take_part_in_backward(self) -> None:
        """Join the other ranks' backward, if this rank's loss has no gradient. Collective."""
        outputs, self._outputs = self._outputs, []
        if outputs:
            torch.autograd.backward(outputs, [torch.zeros_like(each) for each in outputs])
