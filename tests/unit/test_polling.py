"""How often and how late waits for other ranks look."""

import pytest

from kaitian_mpi.runtime import polling


class Clock:
    """A clock that only sleeping and looking move."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.looks = 0
        monkeypatch.setattr(polling.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(polling.time, "sleep", self.pass_time)
        monkeypatch.setattr(polling.os, "sched_yield", lambda: self.pass_time(5e-6))

    def pass_time(self, seconds):
        self.now += seconds

    def has_come(self, at):
        self.looks += 1
        return self.now >= at


@pytest.mark.parametrize("has_own_core", [True, False])
@pytest.mark.parametrize("seconds", [0.001, 0.05, 0.5, 20.0])
def test_a_wait_is_little_late_and_on_a_shared_core_a_long_one_looks_seldom(
    monkeypatch, seconds, has_own_core
):
    monkeypatch.setattr(polling, "_shares_core", polling._shares_core)
    clock = Clock(monkeypatch)
    polling.set_core_sharing(not has_own_core)
    assert polling.wait_until(lambda: clock.has_come(seconds))
    late = clock.now - seconds
    may_be_late = 0.02 * seconds if has_own_core else max(0.01 * seconds, min(0.1 * seconds, 1e-3))
    assert late <= min(may_be_late, 1e-3 if has_own_core else 5e-3) + 20e-6
    looks_per_sec = 1010 if has_own_core else 210  # of a core, 3.5% and 0.7% at 35 us for a look
    assert clock.looks <= 700 + seconds * looks_per_sec
