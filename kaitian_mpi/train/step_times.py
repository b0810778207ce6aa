"""Times of steps: a rank's clock, and the exchange of the ranks' times and next calls."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kaitian_mpi.balance.rebalancer import RankSteps
from kaitian_mpi.devices import Device
from kaitian_mpi.devices.protocol import Mark
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.preflight.verdict import by_value
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.runtime.polling import keep_alive, wait_request
from kaitian_mpi.runtime.ulfm import is_revoked, track_comm
from kaitian_mpi.runtime.watchdog import enter_phase

if TYPE_CHECKING:
    from mpi4py import MPI

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

    Per step, call `start`, `enter` with each phase that follows, `gradients_ready` for each bucket,
    `gradients_summed` and `stop`.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "the optimizer"
    """The phases of computing; all others are waiting."""
    _SUM = "the sum of gradients"

    def __init__(self, device: Device) -> None:
        self._device = device
        self._steps: deque[list[tuple[str, Mark]]] = deque()
        self._phases: list[tuple[str, Mark]] = []  # of the current step, with their beginnings
        # How many phases had begun when the last bucket was computed, and the mark of that time.
        self._ready: tuple[int, Mark] | None = None

    def start(self) -> None:
        """Mark the start of a step, with a forward."""
        self._phases = [(self.FORWARD, self._device.mark())]
        self._ready = None

    def enter(self, phase: str) -> str:
        """Mark the start of a phase, if there is a step; return the phase before."""
        before = ""
        if self._phases:  # or a script has called the model between two steps
            before = self._phases[-1][0]
            self._phases.append((phase, self._device.mark()))
        return before

    def gradients_ready(self) -> None:
        """Mark that the gradients of a bucket are computed."""
        self._ready = len(self._phases), self._device.mark()

    def gradients_summed(self) -> None:
        """Mark the sum of the gradients, which began when their last bucket was computed.

        From then on the rank only waits, for the sum. If no bucket was computed, all time until now
        is waiting.
        """
        begun, ready = self._ready or (0, self._phases[0][1])
        self._phases[begun:] = [(self._SUM, ready)]
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


class ReportExchange:
    """Gathers numbers of every rank in the background. Every method is collective."""

    def __init__(self, comm: MPI.Intracomm, fields: int) -> None:
        """Exchange `fields` numbers of each rank over `comm`, which nothing else may use."""
        self._comm = comm
        self._report = np.empty(fields)
        self._gathered = np.empty((comm.size, fields))
        self._request: MPI.Request | None = None

    def start(self, report: Sequence[float]) -> None:
        """Start to gather the ranks' reports; those before must have been received."""
        assert self._request is None
        self._report[:] = report
        self._request = self._comm.Iallgather(self._report, self._gathered)

    def receive(self) -> np.ndarray | None:
        """Return the numbers gathered since the last call, a row for each rank; None if none were.

        It holds until the next `start`.
        """
        if self._request is None:
            return None
        wait_request(self._request)
        self._request = None
        return self._gathered

    def close(self) -> None:
        """End without waiting for other ranks, as one may be lost. Not collective.

        MPI keeps the buffers of a pending exchange.
        """
        if self._request is not None:
            keep_alive(self._request, self._report, self._gathered)


class Call(IntEnum):
    """The next call of a rank's script, which must be the same on all ranks."""

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

    Also gathers each rank's next call, so that ranks whose scripts diverge report it, and no rank
    waits forever.
    """

    _FIELDS = 6

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Duplicate the communicator. Collective over `comm`, as is every method."""
        self._comm = track_comm(comm.Dup())
        self._reports = ReportExchange(self._comm, self._FIELDS)
        self._calls: list[tuple[MPI.Request, np.ndarray, np.ndarray]] = []  # not checked yet
        self._is_closed = False
        register_close(self.close)

    def announce(self, call: Call, step: int) -> None:
        """Tell the other ranks this one's next call, and check that theirs are the same.

        A rank that trains checks it only at its next call; in between it may wait for the others.

        Raises:
            UserError: the ranks' calls differ.
        """
        if self._is_closed:  # a rank was lost: the step is repeated by another loop
            return
        if call is not Call.SUM:  # amid a step nobody waits: the time would count as computing
            self._check_calls(step)
        sent = np.array([call], np.int64)
        calls = np.empty(self._comm.size, np.int64)
        self._calls.append((self._comm.Iallgather(sent, calls), sent, calls))
        if call.waits:
            enter_phase("the other ranks' next calls", waits=True, limited=False)
            self._check_calls(step)

    def _check_calls(self, step: int) -> None:
        while self._calls:
            wait_request(self._calls[0][0])
            self._compare(self._calls.pop(0)[-1].tolist(), step)

    def _compare(self, by_rank: Sequence[int], step: int) -> None:
        """Raise an error if the ranks' calls differ."""
        if len(set(by_rank)) == 1:
            return
        calls = {rank: Call(call) for rank, call in enumerate(by_rank)}
        names = {rank: str(call) for rank, call in calls.items()}
        text = (
            f"the ranks call different things after step {step}: {by_value(names)}; make the same "
            "calls on every rank, and leave loops on all of them or on none"
        )
        waiting = [rank for rank, call in calls.items() if call.waits] or [0]
        if len(waiting) == len(calls):
            raise AgreedError(text)
        if self._comm.rank != waiting[0]:
            time.sleep(_SPEAKER_SEC)  # the first of the waiting ranks reports it and ends the job
        raise UserError(text)

    def swap(self, report: Sequence[float]) -> StepReports | None:
        """Start sending this step's report; return all of the step before, or None in the first."""
        previous = self._receive()
        self._reports.start(report)
        return previous

    def close(self, together: bool = True) -> None:
        """End the exchange; without waiting, if not `together`: a rank may be lost."""
        unregister_close(self.close)
        self._is_closed = True
        if together and not is_revoked(self._comm):
            self._reports.receive()
            for request, *_ in self._calls:
                wait_request(request)
            self._comm.Free()
            return
        self._reports.close()
        for request, sent, calls in self._calls:
            keep_alive(request, sent, calls)

    def _receive(self) -> StepReports | None:
        gathered = self._reports.receive()
        if gathered is None:
            return None
        steps, samples, work_sec, wait_sec, data_sec, wants = gathered.T.copy()
        times = RankSteps(steps.astype(int), samples.astype(int), work_sec, wait_sec)
        return StepReports(times, data_sec, wants.astype(bool))
