"""Records this rank's events in memory, for the timeline.

Without `--timeline`, `current` is None, and code that records only checks that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kaitian_mpi.runtime.watchdog import on_phase

if TYPE_CHECKING:
    from kaitian_mpi.devices.protocol import Mark

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_EVENTS = 1 << 16
"""The most events kept in memory, about 20 MB; later ones are counted, not kept."""
_STEPS_UNTIL_DOUBLED = 2_000
_MAX_PHASES_BETWEEN_STEPS = 500  # an evaluation may have many more

MAIN = "main"
COLLECTIVES = "collectives"
DEVICE = "device"
COPY_OUT = "relay: copy out"
EXCHANGE = "relay: MPI"
COPY_BACK = "relay: copy back"
RUN = "run"
"""The lane of events of the whole run; their args are the file's event without its time."""
LANES = (MAIN, DEVICE, COLLECTIVES, COPY_OUT, EXCHANGE, COPY_BACK)
"""The lanes of a rank, in the order shown; each further process group adds a lane."""


def is_sampled(step: int, every: int = 0) -> bool:
    """Return whether a step, counted from 1, is recorded: every multiple of `every`.

    0: the first ten steps and every tenth, from step 2,000 on every 20th, from 6,000 on every 40th
    and so on, so that the file of a run of a million steps still opens.
    """
    if every:
        return step % every == 0
    doublings = (step // _STEPS_UNTIL_DOUBLED + 1).bit_length() - 1
    return step <= 10 or step % (10 << doublings) == 0


class TimelineEvent(NamedTuple):
    """Something that happened on this rank; times are those of its own clock, in seconds."""

    lane: str
    name: str
    start: float
    end: float
    args: Mapping[str, Any]


class _Thread(threading.local):
    collective: tuple[str, dict[str, Any]] | None = (
        None  # the lane and args of the one being recorded
    )


class Recorder:
    """Records events of this process; those of steps only in the steps that are sampled.

    Any thread may record; only the main thread enters phases. Nothing blocks or raises.
    """

    def __init__(
        self,
        every: int = 0,
        *,
        capacity: int = MAX_EVENTS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        from kaitian_mpi.observe.timeline.clock import AlignedClock  # not without a timeline

        self.now = now
        self.began = now()
        """When the recorder was created, by `now`."""
        self.clock = AlignedClock()
        """Relates `now` to the other ranks' clocks."""
        self.is_recording = True
        """Whether events are recorded now: in a sampled step, or outside of steps."""
        self.dropped = 0
        """The number of events that were not kept because there were too many."""
        self._every = every
        self._capacity = capacity
        self._events: deque[TimelineEvent] = deque()
        self._device_spans: deque[tuple[str, str, Mark, Mark, Mapping[str, Any]]] = deque()
        self._phase: tuple[str, float, int | None] | None = None
        self._phases_since_step = 0
        self._main = threading.get_ident()
        self._thread = _Thread()

    def enter_phase(self, phase: str, step: int | None) -> None:
        """End the main thread's phase and begin the next."""
        now = self.now()
        if self._phase is not None:
            name, start, ended = self._phase
            self.add(MAIN, name, start, now, {} if ended is None else {"step": ended})
            self._phase = None
        self._phases_since_step = self._phases_since_step + 1 if step is None else 0
        # Ranks may enter different numbers of phases between steps, but record the same
        # collectives.
        self.is_recording = step is None or is_sampled(step, self._every)
        if self._phases_since_step > _MAX_PHASES_BETWEEN_STEPS:
            self.dropped += 1
        elif self.is_recording:
            self._phase = (phase, now, step)

    def add(
        self, lane: str, name: str, start: float, end: float, args: Mapping[str, Any] | None = None
    ) -> None:
        """Record an event in a lane; its times are by `now`."""
        self._keep(self._events, TimelineEvent(lane, name, start, end, args or {}))

    def add_device_span(
        self, lane: str, name: str, start: Mark, end: Mark, args: Mapping[str, Any] | None = None
    ) -> None:
        """Record work of the device between two marks, whose times are read later."""
        self._keep(self._device_spans, (lane, name, start, end, args or {}))

    def _keep(self, kept: deque[Item], item: Item) -> None:
        if len(kept) < self._capacity:
            kept.append(item)
        else:
            self.dropped += 1

    @contextmanager
    def span(self, lane: str, name: str, args: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Record the block as an event."""
        start = self.now()
        try:
            yield
        finally:
            self.add(lane, name, start, self.now(), args)

    def wait(self, name: str) -> AbstractContextManager[None]:
        """Record the block as a wait within the main thread's phase; nothing in other threads."""
        is_main = threading.get_ident() == self._main
        return self.span(MAIN, name) if self.is_recording and is_main else nullcontext()

    @contextmanager
    def collective(self, lane: str, name: str, args: dict[str, Any]) -> Iterator[None]:
        """Record the block as a collective, which this thread carries out."""
        outer = self._thread.collective
        self._thread.collective = (lane, args)
        try:
            with self.span(lane, name, args):
                yield
        finally:
            self._thread.collective = outer

    @property
    def collective_lane(self) -> str | None:
        """The lane of the recorded collective that this thread carries out, if any."""
        collective = self._thread.collective
        return None if collective is None else collective[0]

    def annotate(self, **args: Any) -> None:
        """Add to the args of the collective that this thread carries out."""
        if (collective := self._thread.collective) is not None:
            collective[1].update(args)

    def take(self) -> list[TimelineEvent]:
        """Remove and return the events recorded since the last call."""
        # Other threads may append meanwhile.
        return [self._events.popleft() for _ in range(len(self._events))]

    def take_dropped(self) -> int:
        """Return the number of events dropped since the last call."""
        dropped = self.dropped
        self.dropped = 0
        return dropped

    def take_device_spans(self, make_mark: Callable[[], Mark]) -> list[TimelineEvent]:
        """Remove and return the finished work of the device; `make_mark` marks its stream."""
        if not self._device_spans:
            return []
        # Marks give only the time between them; this one's time by the host's clock is known.
        anchor = make_mark()
        anchor.wait()
        anchor_time = self.now()
        events = []
        while self._device_spans and self._device_spans[0][3].is_reached():
            lane, name, begin, end, args = self._device_spans.popleft()
            begin_time = anchor_time - anchor.seconds_since(begin)
            end_time = anchor_time - anchor.seconds_since(end)
            if begin_time <= end_time:  # false for a phase that this rank skipped in the step
                events.append(TimelineEvent(lane, name, begin_time, end_time, args))
        return events


current: Recorder | None = None
"""This process's recorder; None unless a timeline is being recorded."""


def start_recording(recorder: Recorder) -> None:
    """Record this process's events from now on, including its main thread's phases."""
    global current
    current = recorder
    on_phase(recorder.enter_phase)


def stop_recording() -> None:
    """Stop recording."""
    global current
    current = None
    on_phase(None)


class GroupLabel(NamedTuple):
    """Identifies a process group."""

    name: str
    """torch's name, which torch may reuse once this group is destroyed."""
    unique: str
    """The same on every rank of the group, and different from every other group's."""

    @property
    def lane(self) -> str:
        """The lane in which its collectives are shown."""
        return COLLECTIVES if self.name in ("", "0") else f"{COLLECTIVES} of group {self.name}"


def recorded(
    call: Callable[[], Result], name: str, group: GroupLabel, number: int, /, **args: Any
) -> Callable[[], Result]:
    """Wrap a call that carries out a collective so that it is recorded, if this step is sampled.

    `number` counts the collectives of the group, and is the same on every rank.
    """
    recorder = current
    if recorder is None or not recorder.is_recording:
        return call
    identity = f"{group.unique}#{number}"
    labels = {"number": number, "group": group.name, "collective": identity, **args}

    def carry_out() -> Result:
        with recorder.collective(group.lane, name, labels):
            return call()

    return carry_out


def part(name: str, lane: str | None = None, **args: Any) -> AbstractContextManager[None]:
    """Return a context manager that records part of the collective this thread is carrying out."""
    if current is None or (own_lane := current.collective_lane) is None:
        return _NOTHING
    return current.span(lane or own_lane, name, args)


_NOTHING = nullcontext()
