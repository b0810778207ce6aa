"""A step's compute time and wait time."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import torch


class StepTimes(NamedTuple):
    """Seconds of some steps, added up."""

    steps: int = 0
    computed: float = 0.0
    waited: float = 0.0


class StepClock(Protocol):
    """Splits steps into computing and waiting for communication.

    A step is `start`, `bucket_ready` at each bucket of gradients, `gradients_summed`, `stop`. What
    lies between the last bucket and the sum is waiting: nothing is left to compute there.
    """

    def start(self) -> None:
        """Begin a step."""
        ...

    def bucket_ready(self) -> None:
        """A bucket's gradients are computed; nothing may be after it."""
        ...

    def gradients_summed(self) -> None:
        """The gradients of all ranks are in place."""
        ...

    def stop(self) -> None:
        """End the step."""
        ...

    def take(self, wait: bool = False) -> StepTimes:
        """Return the times of the steps that the device has ended, since the last call.

        Args:
            wait: whether to wait until the device has ended all of them.
        """
        ...


class HostClock:
    """For devices whose calls return when the work is done."""

    def __init__(self) -> None:
        self._start = self._ready = self._waited_here = 0.0
        self._times = StepTimes()

    def start(self) -> None:
        """Begin a step."""
        self._start = self._ready = time.perf_counter()

    def bucket_ready(self) -> None:
        """Note the time of what may be the last bucket."""
        self._ready = time.perf_counter()

    def gradients_summed(self) -> None:
        """Note how long the sum took after the last bucket."""
        self._waited_here = time.perf_counter() - self._ready

    def stop(self) -> None:
        """Add the step up."""
        steps, computed, waited = self._times
        computed += time.perf_counter() - self._start - self._waited_here
        self._times = StepTimes(steps + 1, computed, waited + self._waited_here)

    def take(self, wait: bool = False) -> StepTimes:
        """Return the times of the steps since the last call."""
        times, self._times = self._times, StepTimes()
        return times


class EventClock:
    """For accelerators with streams: marks in the stream, read once the device has passed them."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._steps: list[list[Any]] = []
        self._marks: list[Any] = []

    def start(self) -> None:
        """Begin a step."""
        mark = self._mark()
        self._marks = [mark, mark, mark]

    def bucket_ready(self) -> None:
        """Mark what may be the last bucket."""
        self._marks[1] = self._mark()

    def gradients_summed(self) -> None:
        """Mark the end of the sum."""
        self._marks[2] = self._mark()

    def stop(self) -> None:
        """Mark the end of the step."""
        self._steps.append([*self._marks, self._mark()])

    def take(self, wait: bool = False) -> StepTimes:
        """Return the times of the steps that the device has ended, since the last call."""
        if wait:
            self._module.synchronize()
        steps, computed, waited = 0, 0.0, 0.0
        while self._steps and self._steps[0][-1].query():
            start, ready, summed, end = self._steps.pop(0)
            computed += (start.elapsed_time(ready) + summed.elapsed_time(end)) / 1e3
            waited += ready.elapsed_time(summed) / 1e3
            steps += 1
        return StepTimes(steps, computed, waited)

    def _mark(self) -> Any:
        mark = self._module.Event(enable_timing=True)
        mark.record()
        return mark


def make_clock(device: torch.device) -> StepClock:
    """Return the clock for a device."""
    return EventClock(device) if device.type in ("cuda", "xpu") else HostClock()
