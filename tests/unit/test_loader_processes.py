"""Data loader workers exit with their rank, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

LIMIT_SEC = 30


class Identities:
    """A dataset whose samples are the ids of the processes that load them."""

    def __len__(self):
        return 8

    def __getitem__(self, indices):
        return os.getpid()


def load_and_wait():
    from kaitian_mpi.data.loader import make_loader

    batches = iter(make_loader(Identities(), [[index] for index in range(8)], 1, False))
    print(next(batches), flush=True)
    time.sleep(LIMIT_SEC)


def test_a_worker_exits_when_its_rank_is_killed():
    code = "import test_loader_processes as t; t.load_and_wait()"
    folder = Path(__file__).parent
    rank = subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    try:
        loading = psutil.Process(int(rank.stdout.readline()))
        fork_server = loading.parent()
        assert fork_server.pid != rank.pid
    finally:
        rank.send_signal(signal.SIGKILL)
        rank.wait()
        rank.stdout.close()
    _, alive = psutil.wait_procs([loading, fork_server], timeout=LIMIT_SEC)
    for process in alive:
        process.kill()
    assert not alive
