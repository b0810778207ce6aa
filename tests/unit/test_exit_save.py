"""Saving on a signal, in real processes killed right after it, as mpirun does to its ranks."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from kaitian_mpi.runtime.polling import wait_until

LONGEST_SEC = 30

# Its state is two numbers, which are equal except during an update.
RANK = """
import os, sys, time
from pathlib import Path
from kaitian_mpi.runtime.signals import handle_signals, on_exit_signal
from kaitian_mpi.train.checkpoint.exit_save import StateLock
where, fails = sys.argv[2], sys.argv[3] == "fails"
handle_signals("program")
lock, state, rank = StateLock(), [0, 0], os.getpid()
def save():
    time.sleep(1)
    Path(sys.argv[1]).write_text(f"{state[0]} {state[1]}")
    return f"step {state[0]} is saved"
lock.set_exit_save(save, after_fork=Path(f"{sys.argv[1]}-forked").touch)
with on_exit_signal(lock.save, lock.interrupt):
    while True:
        with lock:
            state[0] += 1
            if where == "inside" and state[0] == 3:
                print("ready", flush=True)
                while os.getpid() == rank:  # as long as this process lives
                    time.sleep(0.01)
                if fails:
                    raise ValueError("planted")
            state[1] += 1
        if where == "outside" and state[0] == 3:
            print("ready", flush=True)
            time.sleep(1000)
"""


def end(folder, where, how):
    """Run such a rank and end it once it has forked; return what it saved, and stderr.

    mpirun ends a rank a quarter of a second after the signal, however busy the machine is.
    """
    saved, has_forked = folder / "saved", folder / "saved-forked"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMPI_COMM_WORLD")}
    command, pipes = [sys.executable, "-c", RANK, saved, where, how], [subprocess.PIPE] * 2
    options = {"text": True, "env": environment, "start_new_session": True}
    rank = subprocess.Popen(command, stdout=pipes[0], stderr=pipes[1], **options)
    assert rank.stdout.readline() == "ready\n"
    os.killpg(rank.pid, signal.SIGTERM)
    wait_until(has_forked.exists, LONGEST_SEC)
    for child in psutil.Process(rank.pid).children():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with suppress(psutil.NoSuchProcess):
                child.send_signal(number)  # as a batch system does, to every process of a job
    os.killpg(rank.pid, signal.SIGKILL)
    _, err = rank.communicate(timeout=LONGEST_SEC)  # the child holds stderr until it has saved
    return (saved.read_text() if saved.exists() else None), err


@pytest.mark.parametrize(
    ("where", "how", "state", "line"),
    [
        ("outside", "well", "3 3", "step 3 is saved"),
        ("inside", "well", "3 3", "step 3 is saved"),  # once the update is complete
        ("inside", "fails", None, "nothing could be saved: planted"),
    ],
)
def test_the_state_is_saved_even_if_the_rank_is_killed(tmp_path, where, how, state, line):
    saved, err = end(tmp_path, where, how)
    assert saved == state
    assert f"program: {line}" in err.splitlines()[-1 if state else 0 :]
