"""A step's compute time and wait time."""

from __future__ import annotations

from typing import NamedTuple

from kaitian_mpi.devices import Device
from kaitian_mpi.devices.protocol import Mark


class StepTimes(NamedTuple):
    """Seconds of some steps, added up."""

    steps: int = 0
    computed: float = 0.0
    waited: float = 0.0


class StepClock:
    """Splits steps into computing and waiting for communication, by marks of the device.

    A step is `start`, `bucket_ready` at each bucket of gradients, `gradients_summed`, `stop`. What
    lies between the last bucket and the sum is waiting: nothing is left to compute there.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._steps: list[list[Mark]] = []
        self._marks: list[Mark] = []

    def start(self) -> None:
        """Begin a step."""
        mark = self._device.mark()
        self._marks = [mark, mark, mark]

    def bucket_ready(self) -> None:
        """Note that a bucket's gradients are computed; it may be the last."""
        self._marks[1] = self._device.mark()

    def gradients_summed(self) -> None:
        """Note that the gradients of all ranks are summed."""
        self._marks[2] = self._device.mark()

    def stop(self) -> None:
        """End the step."""
        self._steps.append([*self._marks, self._device.mark()])

    def take(self, wait: bool = False) -> StepTimes:
        """Return the times of the steps that the device has ended, since the last call.

        Args:
            wait: whether to wait until the device has ended all of them.
        """
        if wait and self._steps:
            self._steps[-1][-1].wait()
        steps, computed, waited = 0, 0.0, 0.0
        while self._steps and self._steps[0][-1].is_reached():
            start, ready, summed, end = self._steps.pop(0)
            computed += ready.seconds_since(start) + end.seconds_since(summed)
            waited += summed.seconds_since(ready)
            steps += 1
        return StepTimes(steps, computed, waited)
