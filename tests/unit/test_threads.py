"""How long a thread's turns on a core are."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kaitian_mpi.runtime.threads import take_long_turns

LONG_TURN_NS = 100_000_000


def turn_ns():
    """Return how long this thread's turns are."""
    lines = Path(f"/proc/self/task/{threading.get_native_id()}/sched").read_text().splitlines()
    values = dict(map(str.strip, line.split(" : ")) for line in lines if " : " in line)
    return float(values["se.slice"])


def in_new_thread(function):
    """Call a function in a thread: what it does to its turns ends with that."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.fixture
def usual_ns():
    try:
        usual_ns = in_new_thread(turn_ns)
    except (OSError, KeyError):
        pytest.skip("the kernel does not show how long a thread's turns are")
    assert usual_ns < LONG_TURN_NS
    return usual_ns


@pytest.mark.usefixtures("usual_ns")
def test_a_thread_takes_long_turns_and_keeps_its_priority():
    def niceness_and_turn():
        os.setpriority(os.PRIO_PROCESS, 0, 3)
        take_long_turns()
        return os.getpriority(os.PRIO_PROCESS, 0), turn_ns()

    assert in_new_thread(niceness_and_turn) == (3, LONG_TURN_NS)


def test_the_threads_that_it_starts_take_turns_as_usual(usual_ns):
    def turns():
        take_long_turns()
        return turn_ns(), in_new_thread(turn_ns)

    assert in_new_thread(turns) == (LONG_TURN_NS, usual_ns)
