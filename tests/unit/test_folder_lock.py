"""Processes that write checkpoints to the same folder wait for each other."""

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from kaitian_mpi.observe.folder_lock import saving_in, wait_for_save

LONGEST_SEC = 30

# Writes `done` to the folder just before it releases the lock.
WRITER = """
import sys, time
from pathlib import Path
from kaitian_mpi.observe.folder_lock import saving_in
folder = Path(sys.argv[1])
with saving_in(folder):
    print("ready", flush=True)
    time.sleep(float(sys.argv[2]))
    (folder / "done").touch()
"""


def start_writer(folder, seconds):
    command = [sys.executable, "-c", WRITER, folder, str(seconds)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "ready\n"
    return writer


def test_an_active_writer_is_logged_and_waited_for(tmp_path, caplog):
    caplog.set_level("INFO")
    with start_writer(tmp_path, 0.7) as writer:
        wait_for_save(tmp_path)
        assert (tmp_path / "done").exists()
        assert writer.wait(LONGEST_SEC) == 0
    wait_for_save(tmp_path)
    (line,) = caplog.messages  # of the first
    assert f"process {writer.pid} of " in line
    assert os.listdir(tmp_path) == ["done"]


def test_processes_write_one_at_a_time(tmp_path):
    with start_writer(tmp_path, 0.7) as writer, saving_in(tmp_path):
        assert (tmp_path / "done").exists()
        assert writer.wait(LONGEST_SEC) == 0


def test_a_writer_that_was_killed_is_not_waited_for(tmp_path, caplog):
    caplog.set_level("INFO")
    with start_writer(tmp_path, 1000) as writer:
        writer.kill()
    wait_for_save(tmp_path)
    assert caplog.messages == []
    with saving_in(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_waiting_for_no_writer_creates_nothing(tmp_path, caplog):
    caplog.set_level("INFO")
    for folder in (tmp_path, tmp_path / "none"):
        wait_for_save(folder)
    assert caplog.messages == []
    assert list(tmp_path.iterdir()) == []


# Stands for mpirun and one rank; the process that saves the rank's state outlives both.
MPIRUN = """#!/bin/sh
mkdir -p run/checkpoints
trap 'exit 7' INT TERM
setsid "$PYTHON" saver.py run/checkpoints > /dev/null 2>&1 &
while :; do sleep 0.05; done
"""
SAVER = """
import sys, time
from pathlib import Path
from kaitian_mpi.observe.folder_lock import saving_in
with saving_in(Path(sys.argv[1])):
    Path("saving").touch()
    while not Path("may-end").exists():
        time.sleep(0.01)
    Path("saved").touch()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopping_supervisor_waits_until_the_state_is_saved(tmp_path, number):
    (tmp_path / "mpirun").write_text(MPIRUN)
    (tmp_path / "mpirun").chmod(0o755)
    (tmp_path / "saver.py").write_text(SAVER)
    command = "kaitian_mpi.cli.supervise ./mpirun -np 1 kaitian-train --run-dir run"
    supervisor = subprocess.Popen(
        [sys.executable, "-m", *command.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable},
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts these tests in the background has SIGINT ignored.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_for(tmp_path / "saving")
        supervisor.send_signal(number)
        line = next((line for line in supervisor.stderr if "waiting for" in line), "")
        with pytest.raises(subprocess.TimeoutExpired):
            supervisor.wait(0.5)
    finally:
        (tmp_path / "may-end").touch()
    assert supervisor.wait(LONGEST_SEC) == 128 + number
    assert (tmp_path / "saved").exists()
    writer = rf"process \d+ of {re.escape(socket.gethostname())}"
    said = rf"waiting for {writer}, which is still writing a checkpoint in run/checkpoints"
    assert re.fullmatch(f"kaitian-supervise: {said}\n", line)
    supervisor.stderr.close()


def wait_for(path):
    ends_at = time.monotonic() + LONGEST_SEC
    while not path.exists():
        assert time.monotonic() < ends_at, f"no {path}"
        time.sleep(0.02)
