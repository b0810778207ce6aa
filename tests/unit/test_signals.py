"""Signals to children that a rank has forked, in real processes."""

import os
import subprocess
import sys

import pytest


def run(script, argument, **environ):
    # Python 3.12 warns of threads at a fork.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, argument]
    environ = os.environ | environ
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=environ)


RANK = """
import os, signal, sys, time
from kaitian_mpi.runtime.signals import handle_signals
handle_signals("program")
ready, say_ready = os.pipe()
child = os.fork()
if child == 0:
    try:
        os.write(say_ready, b"x")
        signal.pause()
    except KeyboardInterrupt:
        os._exit(7)
    os._exit(9)
os.read(ready, 1)
os.kill(child, int(sys.argv[1]))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
time.sleep(0.3)  # in which the rank would end, were the signal its own
print("still there")
"""


@pytest.mark.parametrize(("number", "code"), [(15, -15), (2, 7)], ids=["SIGTERM", "SIGINT"])
def test_a_signal_to_a_forked_child_does_not_reach_the_rank(number, code):
    """The child has Python's default handlers, and the rank keeps running."""
    ended = run(RANK, str(number))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [str(code), "still there"]


SIGNALED = """
import os, signal, sys, time
from kaitian_mpi.runtime import signals
from kaitian_mpi.runtime.signals import handle_signals, on_exit_signal
signals.write_to_launcher_stderr = lambda text: print(text, flush=True)
handle_signals("program")
with on_exit_signal(lambda: None, reports=sys.argv[1] == "first"):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
"""


@pytest.mark.parametrize(("place", "lines"), [("first", 1), ("later", 0)])
def test_the_first_rank_left_says_that_a_signal_ends_the_job(place, lines):
    ended = run(SIGNALED, place, OMPI_COMM_WORLD_RANK="2", OMPI_COMM_WORLD_SIZE="3")
    assert ended.stdout.count("terminated by SIGTERM") == lines, ended.stderr
    assert ended.returncode
