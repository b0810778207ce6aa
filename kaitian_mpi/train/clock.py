"""Measures the compute time and wait time of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kaitian_mpi.devices import Device
from kaitian_mpi.devices.protocol import Mark
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.observe.timeline.recorder import DEVICE


class StepTimes(NamedTuple):
    """The summed times of some steps, in seconds."""

    steps: int = 0
    computed: float = 0.0
    """Time without waiting for other ranks."""
    waited: float = 0.0
    """Time spent only waiting for communication."""


class PhaseTimes(NamedTuple):
    """What the compute time of some steps was spent on, in seconds; adds up to `computed`."""

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0


class _Marks:
    """The marks of one step."""

    def __init__(self, start: Mark) -> None:
        self.start = self.ready = self.summed = self.end = start
        self.forward_since: Mark | None = start
        """Where the current forward began; None in a backward."""
        self.forwards: list[tuple[Mark, Mark]] = []
        self.forward_waits: list[tuple[Mark, Mark]] = []
        self.backward_waits: list[tuple[Mark, Mark]] = []

    def waited(self) -> float:
        """Return the seconds spent waiting."""
        waits = _seconds(self.forward_waits) + _seconds(self.backward_waits)
        return self.summed.seconds_since(self.ready) + waits

    def spans(self) -> Iterator[tuple[str, Mark, Mark]]:
        """Return the phases, in order, with the marks where they begin and end."""
        nexts = [since for since, _ in self.forwards[1:]] + [self.ready]
        for (since, to), following in zip(self.forwards, nexts, strict=False):
            yield "forward", since, to
            yield "backward", to, following
        yield "the sum of gradients", self.ready, self.summed
        yield "the optimizer", self.summed, self.end

    def phases(self) -> PhaseTimes:
        """Return the seconds spent computing."""
        forward_waits = _seconds(self.forward_waits)
        computed = self.ready.seconds_since(self.start)
        computed -= forward_waits + _seconds(self.backward_waits)
        forward = _seconds(self.forwards) - forward_waits if self.forwards else computed
        # Where no bucket is ready before the sum, all until then counts as waiting.
        forward = max(0.0, min(forward, computed))
        return PhaseTimes(forward, computed - forward, self.end.seconds_since(self.summed))


class StepClock:
    """Splits steps into computing and waiting for communication, by timestamps of the device.

    Per step, call `start`, `gradients_summed` and `stop`. Waiting is the time between the last
    bucket and the sum, for nothing is left to compute then, and what is between `wait_begins` and
    `wait_ends`. Forward lasts from `start` or `forward_begins` to `backward_begins`.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._steps: list[_Marks] = []
        self._marks: _Marks | None = None
        self._phases = PhaseTimes()

    def start(self) -> None:
        """Mark the start of a step, with a forward."""
        self._marks = _Marks(self._device.mark())

    def backward_begins(self) -> None:
        """Mark the end of a micro-batch's forward."""
        marks = self._step
        if marks.forward_since is not None:
            marks.forwards.append((marks.forward_since, self._device.mark()))
            marks.forward_since = None

    def forward_begins(self) -> None:
        """Mark the end of a micro-batch's backward, after which another forward comes."""
        self._step.forward_since = self._device.mark()

    def wait_begins(self) -> Mark:
        """Mark the begin of waiting for other ranks, and return the mark."""
        return self._device.mark()

    def wait_ends(self, began: Mark) -> None:
        """Mark the end of that waiting."""
        marks = self._marks
        if marks is not None:  # or a script has called the model before the first step
            is_forward = marks.forward_since is not None
            waits = marks.forward_waits if is_forward else marks.backward_waits
            waits.append((began, self._device.mark()))

    def gradients_summed(self, ready: Mark | None = None) -> None:
        """Mark the sum of the gradients; `ready` marks where their last bucket was computed."""
        self._step.ready = ready or self._step.ready
        self._step.summed = self._device.mark()

    def stop(self) -> None:
        """Mark the end of the step."""
        self._step.end = self._device.mark()
        self._steps.append(self._step)
        current = recorder.current
        if current is not None and current.is_recording and not self._device.is_host:
            for name, since, to in self._step.spans():
                current.add_device_span(DEVICE, name, since, to)

    @property
    def _step(self) -> _Marks:
        assert self._marks is not None, "no step has been started"
        return self._marks

    def take(self, wait: bool = False) -> StepTimes:
        """Return the times of the steps that the device has finished since the last call."""
        if wait and self._steps:
            self._steps[-1].end.wait()
        steps, computed, waited = 0, 0.0, 0.0
        while self._steps and self._steps[0].end.is_reached():
            marks = self._steps.pop(0)
            phases = marks.phases()
            self._phases = PhaseTimes(*(a + b for a, b in zip(self._phases, phases, strict=True)))
            computed += sum(phases)
            waited += marks.waited()
            steps += 1
        return StepTimes(steps, computed, waited)

    def take_phases(self) -> PhaseTimes:
        """Return the phases of all steps that `take` has returned since the last call."""
        phases, self._phases = self._phases, PhaseTimes()
        return phases


def _seconds(spans: list[tuple[Mark, Mark]]) -> float:
    return sum(to.seconds_since(since) for since, to in spans)
