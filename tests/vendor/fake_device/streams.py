"""Streams and events of the emulated device: each stream is a thread, which does its work in order.

Contract: pytorch/pytorch, `c10/cuda/CUDAStream.h` (the current stream and device are each thread's;
`torch.cuda.stream` restores both on leaving it, by `THCPModule_setStream` in
`torch/csrc/cuda/Module.cpp`) and `c10/cuda/CUDAFunctions.cpp` (`SetDevice` makes a context).
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import queue
import threading
import time
from typing import NamedTuple

import torch

from kaitian_mpi.runtime.abort import abort_with_traceback
from kaitian_mpi.runtime.polling import reduce_timer_slack

from .extension import PRIVATE_USE_1, library

LATE_SEC = 100e-6  # by which a thread may wake up late
_IDLE_SEC = 1.0  # after which a stream's thread ends, until there is work again

spins: list[Event] = []
"""The events for which the host has waited on a core, as for those of CUDA without `blocking`."""

contexts: set[int] = set()
"""The devices that this process has touched; each takes memory for its context."""


class Synchronization(NamedTuple):
    """One time that the host has waited for the device."""

    name: str
    """`item`, `copy`, `pageable copy`, `event`, `stream` or `device`."""
    thread: str


synchronizations: list[Synchronization] = []
"""All times that the host has waited for a device, since whoever counts them has cleared it."""


def host_waits(name: str) -> None:
    """Note that the host waits for the device."""
    synchronizations.append(Synchronization(name, threading.current_thread().name))


class StreamQueue:
    """What a stream has to do. It lasts as long as the process, as the streams of torch's pool do.

    Work that only takes time, and of which it is known when it ends, is but noted: it needs no
    thread, as on a device, whose copy engines need no processor. All other work is the thread's.
    """

    def __init__(self) -> None:
        self.ends_at = 0.0
        """When what has been noted ends; what the thread still has to do ends later."""
        self.left = 0
        """How many tasks have not been done."""
        self.lock = threading.Lock()
        """Nothing is allocated while it is held: the collector may free tensors, which gives tasks.
        """
        self.thread: threading.Thread | None = None
        self._has_thread = False
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()

    def give(self, task, then=lambda: None) -> None:
        """Queue a task for the thread, and what it does once it no longer has the task."""
        given = self.ends_at, task, then
        put = self._tasks.put
        with self.lock:
            self.left += 1
            put(given)
            is_without_thread = not self._has_thread
            self._has_thread = True
        if is_without_thread:
            self.thread = threading.Thread(target=self._do, name="fake stream", daemon=True)
            self.thread.start()

    def is_foreseeable(self) -> bool:
        """Return whether all that it was given ends at a known time."""
        return not self.left

    def wait_event(self, event: Event) -> None:
        reached, reached_at = event.reached, event.reached_at
        if reached is not None and not reached.is_set():
            self.give(lambda: wait_until(reached))
        elif reached is None and self.is_foreseeable():
            self.ends_at = max(self.ends_at, reached_at)
        elif reached is None:
            self.give(lambda: sleep_until(reached_at))

    def finish(self) -> None:
        """Wait until all is done, without counting it: no device would wait here."""
        if threading.current_thread() is not self.thread:
            event = Event(blocking=True)
            event.record_on(self)
            event.wait()

    def end(self) -> None:
        """End the thread."""
        thread = self.thread
        self._tasks.put(None)
        if thread is not None:
            thread.join(5)

    def _do(self) -> None:
        reduce_timer_slack()
        while (next_task := self._next()) is not None:
            try:
                begins_at, task, then = next_task
                sleep_until(begins_at)
                task()
                with self.lock:
                    self.left -= 1
                then()
                del next_task, task, then  # which may keep tensors
            except BaseException:
                abort_with_traceback("the fake accelerator failed:\n")

    def _next(self):
        try:
            return self._tasks.get(timeout=_IDLE_SEC)
        except queue.Empty:
            with self.lock:
                if self._tasks.empty():
                    self._has_thread = False
                    return None
            return self._tasks.get()


class _Queues(dict[tuple[int, int], StreamQueue]):
    def __missing__(self, key: tuple[int, int]) -> StreamQueue:
        return self.setdefault(key, StreamQueue())  # one, also for two threads that come at once


queues = _Queues()
"""By device and the stream's number; 0 is a device's default stream."""

_numbers = itertools.count(1)


@atexit.register
def end_streams() -> None:
    """End the threads before the interpreter does: one inside torch would abort the process."""
    library.fake_end()
    for stream_queue in list(queues.values()):
        stream_queue.end()


def index_of(device: object = None) -> int:
    """Return a device's index; by default the current one's."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return library.fake_current_device() if index is None else index


class Stream(torch.Stream):
    """Runs operations asynchronously, in the order of submission."""

    def __new__(cls, device: object = None, priority: int = 0, **given: int) -> Stream:
        if not given:
            given = {"stream_id": next(_numbers), "device_index": index_of(device)}
            given["device_type"] = PRIVATE_USE_1
        return super().__new__(cls, **given)

    def __init__(self, device: object = None, priority: int = 0, **given: int) -> None:
        self.queue = queues[self.device_index, self.stream_id]

    def give(self, task, then=lambda: None) -> None:
        """Queue a task, and what is done once the stream no longer has the task."""
        contexts.add(self.device_index)
        self.queue.give(task, then)

    def is_foreseeable(self) -> bool:
        return self.queue.is_foreseeable()

    def wait_event(self, event: Event) -> None:
        self.queue.wait_event(event)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        if threading.current_thread() is not self.queue.thread:
            host_waits("stream")
            self.queue.finish()


def stream_of(device: int, number: int) -> Stream:
    return Stream(stream_id=number, device_index=device, device_type=PRIVATE_USE_1)


def default_stream(device: object = None) -> Stream:
    return stream_of(index_of(device), 0)


def current_stream(device: object = None) -> Stream:
    index = index_of(device)
    return stream_of(index, library.fake_current_stream(index))


def set_stream(chosen: Stream) -> None:
    if library.fake_current_device() != chosen.device_index:
        set_device(chosen.device_index)
    library.fake_set_stream(chosen.device_index, chosen.stream_id)


@contextlib.contextmanager
def stream(chosen: Stream):
    """Make a stream the current one; on leaving, the one before on the device that was current."""
    before, before_there = current_stream(), current_stream(chosen.device_index)
    set_stream(chosen)
    try:
        yield
    finally:
        if before.device_index != chosen.device_index:
            set_stream(before_there)
        set_stream(before)


def current_device() -> int:
    return library.fake_current_device()


def set_device(device: object) -> None:
    """Select this thread's device, for which the process then has a context."""
    index = index_of(device)
    if index >= 0:
        contexts.add(index)
        library.fake_set_device(index)


@contextlib.contextmanager
def device(chosen: object):
    """Select a device for a while, as C++ does: without a context until something needs it."""
    before = current_device()
    library.fake_set_device(index_of(chosen))
    try:
        yield
    finally:
        library.fake_set_device(before)


def synchronize(device: object = None) -> None:
    """Wait for all streams of a device."""
    host_waits("device")
    finish(index_of(device))


def finish(index: int) -> None:
    """Wait for all streams of a device, without counting it."""
    for (device, _), stream_queue in list(queues.items()):
        if device == index:
            stream_queue.finish()


class Event:
    """An event recorded on a stream."""

    def __init__(
        self, stream: Stream | None = None, enable_timing: bool = False, blocking: bool = False
    ) -> None:
        self.blocking = blocking
        self.reached: threading.Event | None = None
        """Set by the stream's thread; None where it is known when the stream reaches it."""
        self.reached_at = 0.0
        if stream is not None:
            self.record(stream)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        contexts.add(stream.device_index)
        self.record_on(stream.queue)

    def record_on(self, queue: StreamQueue) -> None:
        if queue.is_foreseeable():
            self.reached, self.reached_at = None, max(queue.ends_at, time.perf_counter())
            return
        self.reached = threading.Event()
        queue.give(self._note_time, self.reached.set)

    def _note_time(self) -> None:
        self.reached_at = time.perf_counter()

    def query(self) -> bool:
        if self.reached is None:
            return time.perf_counter() >= self.reached_at
        return self.reached.is_set()

    def wait(self) -> None:
        if self.reached is None:
            sleep_until(self.reached_at)
        else:
            wait_until(self.reached)

    def synchronize(self) -> None:
        if not self.blocking:
            spins.append(self)
        host_waits("event")
        self.wait()

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return 1e3 * (end.reached_at - self.reached_at)


def sleep_until(reached_at: float) -> None:
    """Return at a time; a sleep alone would return somewhat later."""
    left = reached_at - LATE_SEC - time.perf_counter()
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < reached_at:
        os.sched_yield()


def wait_until(reached: threading.Event) -> None:
    reached.wait()  # however long it takes, as a device's synchronization does


# What C++ asks for, such as autograd's engine: streams by number, events by a number of their own.

_events: dict[int, Event] = {}
_event_numbers = itertools.count(1)


def record_for_torch(number: int, device: int) -> int:
    key = next(_event_numbers)
    _events[key] = stream_of(device, number).record_event(Event(blocking=True))
    return key


def block_for_torch(key: int, number: int, device: int) -> None:
    stream_of(device, number).wait_event(_events[key])


def query_for_torch(key: int) -> int:
    return int(_events[key].query())


def synchronize_event_for_torch(key: int) -> None:
    _events[key].synchronize()


def destroy_for_torch(key: int) -> None:
    _events.pop(key, None)


def synchronize_stream_for_torch(number: int, device: int) -> None:
    stream_of(device, number).synchronize()


def new_stream_for_torch(device: int) -> int:
    return Stream(device).stream_id
