"""Real commands in subprocesses. Their ranks may outnumber the cores and run as root."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ENVIRONMENT = {
    **os.environ,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
}
PLANTED = Path(__file__).parent / "e2e"
LONGEST_SEC = 120


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float
    ended_at: float

    @property
    def text(self) -> str:
        return self.out + self.err


def start(*command: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env={**ENVIRONMENT, "PYTHONPATH": str(PLANTED), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def finish(process: subprocess.Popen[str], started_at: float) -> Ended:
    try:
        out, err = process.communicate(timeout=LONGEST_SEC)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"still running after {LONGEST_SEC} s\n{out}\n{err}")
    now = time.time()
    err = err.replace("\0", "")  # Open MPI ends its own messages with one
    return Ended(process.returncode, out, err, now - started_at, now)


def run_ranks(ranks: int, *command: str, cwd: Path, **env: str) -> Ended:
    """Run a command under mpirun; the models planted in tests/e2e can be imported."""
    started_at = time.time()
    full = ("mpirun", "-np", str(ranks), *command)
    return finish(start(*full, cwd=cwd, env=env), started_at)


PYTHON = sys.executable
