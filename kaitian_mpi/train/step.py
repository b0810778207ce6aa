"""A global step: in progress, timed, done, what the ranks report of it, and what observes it."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from kaitian_mpi.balance.rebalancer import RankSteps
from kaitian_mpi.devices import Device
from kaitian_mpi.devices.protocol import Mark
from kaitian_mpi.distributed.gradients import Fraction
from kaitian_mpi.distributed.sync_batch_norm import Participation
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.preflight.verdict import by_value, differ
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.runtime.polling import keep_alive, wait_request
from kaitian_mpi.runtime.ulfm import is_revoked, track_comm
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.data.batches import MicroBatch
from kaitian_mpi.train.task import Task

if TYPE_CHECKING:
    from mpi4py import MPI

_BATCH_NORM = "the sums of a batch norm"
_SPEAKER_SEC = 5.0


class StepTimes(NamedTuple):
    """The summed times of some steps, in seconds."""

    steps: int = 0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    waited: float = 0.0
    """Time spent only waiting for communication, which is in none of the other three."""

    @property
    def computed(self) -> float:
        """Time without waiting for other ranks."""
        return self.forward + self.backward + self.optimizer

    def plus(self, other: StepTimes) -> StepTimes:
        return StepTimes(*map(operator.add, self, other))


class StepClock:
    """Splits steps into computing and waiting for communication, by timestamps of the device.

    Per step, call `start`, `enter` with each phase that follows, `gradients_summed` and `stop`.
    """

    FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "the optimizer"
    """The phases of computing; all others are waiting."""
    _SUM = "the sum of gradients"

    def __init__(self, device: Device) -> None:
        self._device = device
        self._steps: deque[list[tuple[str, Mark]]] = deque()
        self._phases: list[tuple[str, Mark]] = []  # of the current step, with their beginnings

    def start(self) -> None:
        """Mark the start of a step, with a forward."""
        self._phases = [(self.FORWARD, self._device.mark())]

    def enter(self, phase: str) -> str:
        """Mark the start of a phase, if there is a step; return the phase before."""
        before = ""
        if self._phases:  # or a script has called the model between two steps
            before = self._phases[-1][0]
            self._phases.append((phase, self._device.mark()))
        return before

    def gradients_summed(self, ready: Mark | None = None) -> None:
        """Mark the sum of the gradients; `ready` marks where their last bucket was computed.

        From there on nothing is left to compute. If no bucket was, all until now is waiting.
        """
        if ready is None:
            self._phases = [(self._SUM, self._phases[0][1])]
        else:
            self._phases.append((self._SUM, ready))
        self.enter(self.OPTIMIZER)

    def stop(self) -> None:
        self.enter("")
        self._steps.append(self._phases)
        current = recorder.current
        if current is not None and current.is_recording and not self._device.is_host:
            for (phase, since), (_, to) in pairwise(self._phases):
                current.add_device_span(recorder.DEVICE, phase, since, to)
        self._phases = []

    def take(self, wait: bool = False) -> StepTimes:
        """Return the times of the steps that the device has finished since the last call."""
        if wait and self._steps:
            self._steps[-1][-1][1].wait()
        steps, waited = 0, 0.0
        computed = {self.FORWARD: 0.0, self.BACKWARD: 0.0, self.OPTIMIZER: 0.0}
        while self._steps and self._steps[0][-1][1].is_reached():
            steps += 1
            for (phase, since), (_, to) in pairwise(self._steps.popleft()):
                if phase in computed:
                    computed[phase] += to.seconds_since(since)
                else:
                    waited += to.seconds_since(since)
        forward, backward, optimizer = computed.values()
        return StepTimes(steps, forward, backward, optimizer, waited)


class StepReports(NamedTuple):
    """All ranks' reports about a step, as arrays with one entry per rank."""

    times: RankSteps
    """Getting the batch counts as the rank's own work, like computing."""
    data_sec: np.ndarray
    wants_checkpoint: np.ndarray


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

    def report(self, wants_checkpoint: bool = False) -> tuple[float, ...]:
        """Return what this rank reports of the step to the others."""
        times, count = self.times, max(1, self.times.steps)
        work_sec = times.computed / count + self.data_sec
        wait_sec = times.waited / count
        return times.steps, self.own_samples, work_sec, wait_sec, self.data_sec, wants_checkpoint


class StepObserver:
    """Follows the steps of a loop on its ranks; the methods do nothing here.

    The loop calls its observers in order. Every method is collective, unless stated otherwise.
    """

    def epoch_begins(self) -> None:
        """Prepare for an epoch, or for the rest of one. Not collective."""

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        """Handle a step that all ranks have done, with the reports about the step before it."""

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
        super().__init__(lambda: self.own_weight)
        self.clock = StepClock(device)
        self._mark, self._pace = device.mark, device.pace
        self.ready: Mark | None = None
        """Where the gradients of the bucket that was ready last were computed."""
        self.data_sec = 0.0
        self.number = 0
        self.batch_sizes: list[int] = []
        self.samples = self.own_samples = 0
        self.weights: Sequence[float] = ()
        """Of this rank's micro-batches: how many terms the mean of each is over."""
        self.own_weight = 0.0
        self._fraction = Fraction(0.0, 0.0)
        self._losses: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []

    def begin(
        self, number: int, task: Task, parts: Sequence[MicroBatch], batch_sizes: list[int]
    ) -> None:
        """Begin a step, counted from 1, with this rank's share. Collective."""
        self.begin_own(number, batch_sizes, sum(part.samples for part in parts))
        self.weights = [
            task.weigh(part.batch, part.samples) if part.samples else 0 for part in parts
        ]
        self.own_weight = sum(self.weights, 0.0)
        # The sum of the ranks' weights is known if these are their samples; else it starts here.
        total = self.samples if task.weight is None else None
        self._fraction = Fraction(self.own_weight, total)

    def begin_own(self, number: int, batch_sizes: list[int], own_samples: int) -> None:
        """Begin a step, counted from 1, whose weights are not this rank's matter."""
        self.number, self.ready, self._losses, self._outputs = number, None, [], []
        self.batch_sizes, self.samples = batch_sizes, sum(batch_sizes)
        self.own_samples, self.weights, self.own_weight = own_samples, (), float(own_samples)

    def bucket_ready(self, is_last: bool) -> None:
        """Mark on the device that the gradients of a bucket are ready."""
        self._pace.catch_up()
        self.ready = self._mark()
        if is_last:
            enter_phase("the sum of gradients", step=self.number, waits=True)

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
        """Return this rank's fraction of the global batch, once all ranks have begun.

        0 if none of its samples counts; None if it has no samples.
        """
        return self._fraction.value if self.own_samples else None

    def weight_of_part(self, index: int) -> float | Callable[[], float] | None:
        """Return what a micro-batch's weighed gradient is to be multiplied with, in a sum of all.

        0 for one in which nothing counts, beside others: its loss was not weighed.
        """
        return self.weight_of_share if self.weights[index] or not self.counts else 0.0

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

    @property
    def counts(self) -> bool:
        """Whether anything of this rank's share counts."""
        return self.own_weight > 0

    @contextmanager
    def waits(self, what: str = _BATCH_NORM) -> Iterator[None]:
        """Return the context of a sum within a step, which may wait for other ranks."""
        self._pace.catch_up()
        before = self.clock.enter(what)
        if not before:  # between two steps
            yield
            return
        enter_phase(what, step=self.number, waits=True)
        yield
        enter_phase("forward or backward", step=self.number)
        self.clock.enter(before)
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


class Call(IntEnum):
    """What a rank does next in its script, as all have to."""

    TRAIN = 0
    SUM = 1
    FINISH = 2
    BEGIN_EPOCH = 3
    EVALUATE = 4
    STOP = 5

    @property
    def waits(self) -> bool:
        """Whether it begins only once all ranks are known to do the same."""
        return self > Call.FINISH

    def __str__(self) -> str:
        steps = "the next step", "backward()", "the end of the run"
        return (*steps, "the next epoch", "evaluate()", "the end of the training")[self]


class StepExchange:
    """Gathers every rank's report of a step while the next step is computed.

    And what each rank does next, so that ranks that part are told so, and none waits for them.
    """

    _FIELDS = 6

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Duplicate the communicator. Collective over `comm`, as is every method."""
        self._comm = track_comm(comm.Dup())
        self._own = np.empty(self._FIELDS)
        self._gathered = np.empty((comm.size, self._FIELDS))
        self._request: MPI.Request | None = None
        self._calls: list[tuple[MPI.Request, np.ndarray, np.ndarray]] = []  # not checked yet
        self._is_closed = False
        register_close(self.close)

    def announce(self, call: Call, step: int) -> None:
        """Tell the other ranks what this one does after a step, and check that they do the same.

        A rank that trains learns it only at its next call; in between it may wait for the others.

        Raises:
            UserError: the ranks do different things.
        """
        if self._is_closed:  # a rank was lost: the step is repeated by another loop
            return
        if call is not Call.SUM:  # amid a step nobody waits: the time would count as computing
            self._check_calls(step)
        own, calls = np.array([call], np.int64), np.empty(self._comm.size, np.int64)
        self._calls.append((self._comm.Iallgather(own, calls), own, calls))
        if call.waits:
            enter_phase("what the other ranks do next", waits=True, limited=False)
            self._check_calls(step)

    def _check_calls(self, step: int) -> None:
        while self._calls:
            wait_request(self._calls[0][0])
            self._compare(self._calls.pop(0)[-1].tolist(), step)

    def _compare(self, by_rank: Sequence[int], step: int) -> None:
        """Raise an error if the ranks do different things."""
        calls = {rank: Call(call) for rank, call in enumerate(by_rank)}
        names = {rank: str(call) for rank, call in calls.items()}
        if not differ(names):
            return
        text = (
            f"the ranks do different things after step {step}: {by_value(names)}; make the same "
            "calls on every rank, and leave loops on all of them or on none"
        )
        waiting = [rank for rank, call in calls.items() if call.waits] or [0]
        if len(waiting) == len(calls):
            raise AgreedError(text)
        if self._comm.rank != waiting[0]:
            time.sleep(_SPEAKER_SEC)  # the first of those that know it says so, and ends the job
        raise UserError(text)

    def swap(self, report: Sequence[float]) -> StepReports | None:
        """Start sending this step's report; return all of the step before, or None in the first."""
        previous = self._receive()
        self._own[:] = report
        self._request = self._comm.Iallgather(self._own, self._gathered)
        return previous

    def close(self, together: bool = True) -> None:
        """End the exchange; without waiting, if not `together`: a rank may be lost."""
        unregister_close(self.close)
        self._is_closed = True
        if together and not is_revoked(self._comm):
            self._receive()
            for request, *_ in self._calls:
                wait_request(request)
            self._comm.Free()
            return
        if self._request is not None:
            keep_alive(self._request, self._own, self._gathered)
        for request, own, calls in self._calls:
            keep_alive(request, own, calls)

    def _receive(self) -> StepReports | None:
        if self._request is None:
            return None
        wait_request(self._request)
        self._request = None
        steps, samples, work_sec, wait_sec, data_sec, wants = self._gathered.T.copy()
        times = RankSteps(steps.astype(int), samples.astype(int), work_sec, wait_sec)
        return StepReports(times, data_sec, wants.astype(bool))
