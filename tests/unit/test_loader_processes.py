"""Data loader workers exit with their rank, however it ends."""

import signal
import subprocess

import psutil
from jobs import PYTHON, forked

LIMIT_SEC = 30

# The samples are the ids of the processes that load them.
RANK = f"""
import os, time
from kaitian_mpi.train.data.batches import Share
from kaitian_mpi.train.data.loader import ShareLoader

class Identities:
    def __len__(self):
        return 8

    def __getitem__(self, indices):
        return os.getpid()

if __name__ == "__main__":
    shares = (Share(0, 0, [(1, [index])]) for index in range(8))
    loading = ShareLoader(Identities(), 1, pin_memory=False).load(shares)
    print(os.getpid(), next(loading)[0].batch, flush=True)
    time.sleep({LIMIT_SEC})
"""


def test_a_worker_exits_when_its_rank_is_killed(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    rank = subprocess.Popen(forked([PYTHON, str(script)]), stdout=subprocess.PIPE, text=True)
    try:
        rank_pid, loading_pid = map(int, rank.stdout.readline().split())
        loading = psutil.Process(loading_pid)
        fork_server = loading.parent()
        assert fork_server.pid != rank_pid
    finally:
        rank.send_signal(signal.SIGKILL)
        rank.wait()
        rank.stdout.close()
    _, alive = psutil.wait_procs([loading, fork_server], timeout=LIMIT_SEC)
    for process in alive:
        process.kill()
    assert not alive
