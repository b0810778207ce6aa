"""How long a thread's turns on a core are."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from turns import LONG_TURN_NS, turn_ns

from kaitian_mpi.runtime.threads import take_long_turns


def own_turn_ns():
    return turn_ns(threading.get_native_id())


def in_new_thread(function):
    """Call a function in a thread: what it does to its turns ends with that."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.fixture
def usual_ns():
    usual_ns = in_new_thread(own_turn_ns)
    assert usual_ns < LONG_TURN_NS
    return usual_ns


@pytest.mark.usefixtures("usual_ns")
def test_a_thread_takes_long_turns_and_keeps_its_priority():
    def niceness_and_turn():
        os.setpriority(os.PRIO_PROCESS, 0, 3)
        take_long_turns()
        return os.getpriority(os.PRIO_PROCESS, 0), own_turn_ns()

    assert in_new_thread(niceness_and_turn) == (3, LONG_TURN_NS)


def test_the_threads_that_it_starts_take_turns_as_usual(usual_ns):
    def turns():
        take_long_turns()
        return own_turn_ns(), in_new_thread(own_turn_ns)

    assert in_new_thread(turns) == (LONG_TURN_NS, usual_ns)
