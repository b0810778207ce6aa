"""Times steps: how long a rank computes, and how long it only waits for others."""

from __future__ import annotations

import operator
from collections import deque
from itertools import pairwise
from typing import NamedTuple

from kaitian_mpi.devices import Device
from kaitian_mpi.devices.protocol import Mark
from kaitian_mpi.observe.timeline import recorder


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
