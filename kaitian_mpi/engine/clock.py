"""Measures the compute time and wait time of steps."""

from __future__ import annotations

from typing import NamedTuple

from kaitian_mpi.devices import Device
from kaitian_mpi.devices.protocol import Mark


class StepTimes(NamedTuple):
    """The summed times of some steps, in seconds."""

    steps: int = 0
    computed: float = 0.0
    """Time without waiting for other ranks."""
    waited: float = 0.0
    """Time spent only waiting for communication."""


class StepClock:
    """Splits steps into computing and waiting for communication, by timestamps of the device.

    Per step, call `start`, `bucket_ready` for each gradient bucket, `gradients_summed` and `stop`.
    The time between the last bucket and the sum is wait time: nothing is left to compute then. So
    is what is between `wait_begins` and `wait_ends`, before the last bucket.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._steps: list[list[Mark]] = []
        self._waits_of_steps: list[list[tuple[Mark, Mark]]] = []
        self._marks: list[Mark] = []
        self._waits: list[tuple[Mark, Mark]] = []

    def start(self) -> None:
        """Mark the start of a step."""
        mark = self._device.mark()
        self._marks, self._waits = [mark, mark, mark], []

    def wait_begins(self) -> Mark:
        """Return a mark of where waiting for other ranks begins."""
        return self._device.mark()

    def wait_ends(self, began: Mark) -> None:
        """Mark where it ends.

        Args:
            began: what `wait_begins` returned.
        """
        self._waits.append((began, self._device.mark()))

    def bucket_ready(self) -> None:
        """Mark that a bucket's gradients are computed; it may be the last."""
        self._marks[1] = self._device.mark()

    def gradients_summed(self) -> None:
        """Mark that the gradients are summed over all ranks."""
        self._marks[2] = self._device.mark()

    def stop(self) -> None:
        """Mark the end of the step."""
        self._steps.append([*self._marks, self._device.mark()])
        self._waits_of_steps.append(self._waits)

    def take(self, wait: bool = False) -> StepTimes:
        """Return the times of the steps that the device has finished since the last call.

        Args:
            wait: whether to wait until the device has finished all of them.
        """
        if wait and self._steps:
            self._steps[-1][-1].wait()
        steps, computed, waited = 0, 0.0, 0.0
        while self._steps and self._steps[0][-1].is_reached():
            start, ready, summed, end = self._steps.pop(0)
            waits = sum(to.seconds_since(since) for since, to in self._waits_of_steps.pop(0))
            computed += ready.seconds_since(start) + end.seconds_since(summed) - waits
            waited += summed.seconds_since(ready) + waits
            steps += 1
        return StepTimes(steps, computed, waited)
