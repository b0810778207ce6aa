"""How steps, and scripts without a `Training`, are slowed down, by a clock of the test's own."""

import threading

import pytest

from kaitian_mpi.devices import pace
from kaitian_mpi.devices.pace import CallPace, Pace
from kaitian_mpi.runtime.system import CommunicationThread


class Clock:
    """Stands for the module `time`."""

    used_sec = slept_sec = 0.0

    def thread_time(self):
        return self.used_sec

    def sleep(self, seconds):
        self.slept_sec += seconds

    def compute(self, seconds):
        self.used_sec += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(pace, "time", made)
    return made


def test_a_slowed_step_sleeps_in_proportion_to_what_it_computes(clock):
    slowdown = Pace(((0, 2.0), (50, 3.0), (90, 1.0)))
    clock.compute(7)
    slowdown.start()
    for step, slept in ((0, 0.1), (49, 0.2), (50, 0.4), (89, 0.6), (90, 0.6)):
        slowdown.go_to(step)
        clock.compute(0.1)
        slowdown.catch_up()
        assert clock.slept_sec == pytest.approx(slept)


def test_only_the_time_between_calls_counts_whatever_they_are(clock):
    """Two calls, such as those of two groups or of one and its messages, have one measurement."""
    slowdown = CallPace(((0, 3.0), (50, 9.0)))  # the factor from the start
    first = slowdown.around(lambda: clock.compute(5))  # MPI spins in the caller's thread
    second = slowdown.around(lambda text: text)
    clock.compute(7)
    first()  # starts the measurement
    assert clock.slept_sec == 0
    clock.compute(0.1)
    assert second("result") == "result"
    assert clock.slept_sec == pytest.approx(0.2)
    first()
    clock.compute(0.02)
    first()
    assert clock.slept_sec == pytest.approx(0.24)
    clock.compute(5)
    slowdown.forget()  # the creation of a group does not count
    first()
    clock.compute(0.01)
    first()
    assert clock.slept_sec == pytest.approx(0.26)
    slowdown.pause()  # nor a Training, which slows its own steps
    for _ in range(3):
        first()
        clock.compute(1)
    slowdown.resume()
    first()
    clock.compute(0.01)
    first()
    assert clock.slept_sec == pytest.approx(0.28)
    for schedule in ((), ((0, 1.0),), ((0, 1.0), (0, 1.0))):  # not slowed: the method itself
        assert CallPace(schedule).around(first) is first


def test_each_thread_has_its_own_measurement(clock):
    slowdown = CallPace(((0, 3.0),))
    call = slowdown.around(lambda: None)
    call()
    clock.compute(1)

    def compute_and_call():
        call()
        clock.compute(0.1)
        call()

    for kind, slept in ((CommunicationThread, 0), (threading.Thread, 0.2)):
        thread = kind(target=compute_and_call)
        thread.start()
        thread.join()
        assert clock.slept_sec == pytest.approx(slept)
