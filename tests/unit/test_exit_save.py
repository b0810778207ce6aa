"""Saving on a signal, in real processes killed right after it, as mpirun does to its ranks."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from kaitian_mpi.runtime.launcher import SUPERVISED

LONGEST_SEC = 30
GRACE_SEC = 0.75  # mpirun allows less, but this machine may be busy with other tests

# Its state is two numbers, which are equal except during an update.
RANK = """
import hashlib, sys, threading, time
from pathlib import Path
from kaitian_mpi.runtime.signals import handle_signals, on_exit_signal
from kaitian_mpi.train.checkpoint import exit_save as exit_save_module
from kaitian_mpi.train.checkpoint.exit_save import ExitSave, StateLock
where, fails = sys.argv[2], sys.argv[3] == "fails"
if where != "large":  # which an accelerator's build of torch alone may be
    exit_save_module._LARGE_KB = 1 << 40
handle_signals("program")
lock, state = StateLock(), [0, 0]
memory = b"x" * (600 << 20 if where == "large" else 0)
def save():
    time.sleep(1)
    Path(sys.argv[1]).write_text(f"{state[0]} {state[1]}")
    return f"step {state[0]} is saved"
exit_save = ExitSave(lock, save)
if where == "outside":  # the time limit starts after the fork, however busy the machine is
    pause_if_late = exit_save._pause_if_late
    def pause_after_fork():
        while not exit_save._child:
            time.sleep(1e-3)
        pause_if_late()
    exit_save._pause_if_late = pause_after_fork
with on_exit_signal(exit_save.run, exit_save.interrupt):
    while True:
        with lock:
            state[0] += 1
            if where == "one call" and state[0] == 3:
                # Not before that call has begun, in which Python handles no signal.
                threading.Timer(0.3, print, ("ready",), {"flush": True}).start()
                hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)  # seconds without Python
            if where == "inside" and state[0] == 3:
                print("ready", flush=True)
                for _ in range(20):  # longer than this process lives
                    time.sleep(0.1)
                if fails:
                    raise ValueError("planted")
            state[1] += 1
        if where in ("outside", "large") and state[0] == 3:
            print("ready", flush=True)
            time.sleep(1000)
"""


def end(folder, where, how, grace_sec=GRACE_SEC):
    """Run such a rank and end it as mpirun does; return what it saved, and stderr."""
    saved = folder / "saved"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMPI_COMM_WORLD")}
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, saved, where, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert rank.stdout.readline() == "ready\n"
    os.killpg(rank.pid, signal.SIGTERM)
    time.sleep(grace_sec)
    for child in psutil.Process(rank.pid).children():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with suppress(psutil.NoSuchProcess):
                child.send_signal(number)  # as a batch system does, to every process of a job
    os.killpg(rank.pid, signal.SIGKILL)
    _, err = rank.communicate(timeout=LONGEST_SEC)  # the child holds stderr until it has saved
    return (saved.read_text() if saved.exists() else None), err


def test_the_state_is_saved_even_if_the_rank_is_killed(tmp_path):
    saved, err = end(tmp_path, "outside", "well")
    assert saved == "3 3"
    assert err.splitlines()[1:] == ["program: step 3 is saved"]


def test_an_update_in_progress_completes_before_the_save(tmp_path):
    saved, err = end(tmp_path, "inside", "well")
    assert saved == "3 3"
    assert err.splitlines()[1:] == ["program: step 3 is saved"]


def test_a_failed_update_is_not_saved(tmp_path):
    saved, err = end(tmp_path, "inside", "fails")
    assert saved is None
    assert err.splitlines()[1:] == ["program: nothing could be saved: planted"]


# Starts a rank and ends it as mpirun does.
LAUNCHER = """
import os, signal, subprocess, sys, time
from pathlib import Path
Path("/proc/self/comm").write_text("mpirun")
command = [sys.executable, "-c", *sys.argv[2:]]
rank = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)
assert rank.stdout.readline() == b"ready\\n"
os.killpg(rank.pid, signal.SIGTERM)
time.sleep(float(sys.argv.pop(1)))
os.killpg(rank.pid, signal.SIGKILL)
"""

# Has a terminal and waits for a command like a shell with job control.
SHELL = """
import fcntl, os, subprocess, sys, termios
terminal = os.openpty()[1]
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
launcher = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], process_group=0)
shown = 0
while os.WIFSTOPPED(os.waitpid(launcher.pid, os.WUNTRACED)[1]):
    shown += 1
print(shown)
"""


@pytest.mark.parametrize(
    ("where", "supervised", "shown"),
    [
        ("outside", False, 0),
        ("one call", False, 1),  # the main thread cannot fork in time
        ("large", False, 1),  # a fork takes too long
        ("outside", True, 1),  # the supervisor waits instead
    ],
)
def test_the_launcher_is_stopped_only_where_the_state_would_be_lost(
    tmp_path, where, supervised, shown
):
    saved = tmp_path / "saved"
    ended = subprocess.run(
        [sys.executable, "-c", SHELL, LAUNCHER, str(GRACE_SEC), RANK, saved, where, "well"],
        capture_output=True,
        text=True,
        timeout=LONGEST_SEC,
        check=True,
        start_new_session=True,
        env={
            **{k: v for k, v in os.environ.items() if k != SUPERVISED},
            **dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), "0"),
            **dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "1"),
            **({SUPERVISED: "1"} if supervised else {}),
        },
    )
    assert saved.read_text() == "3 3"
    assert ended.stdout == f"{shown}\n"
    assert ended.stderr.splitlines()[1:] == ["program: step 3 is saved"]
