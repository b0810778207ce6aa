"""Counts the jobs that save their last step when mpirun gets SIGTERM, and times the save."""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from recovering.job import Job, Launch, Line

_STARTING_SEC, _SAVING_SEC = 90.0, 120.0
_FIRST_STEP = 3
_MB = (10, 1000)
_STEP = "step-"


def measure(trials: int, seed: int) -> dict[str, Any]:
    """Signal `trials` jobs of each size of state at random moments."""
    choice, sizes = random.Random(seed), {}
    for megabytes in _MB:
        done = [_try(megabytes, choice.uniform(0, 0.3)) for _ in range(trials)]
        seconds = [each for each in done if each is not None]
        sizes[megabytes] = {
            "trials": trials,
            "saved": len(seconds),
            "median_sec": statistics.median(seconds) if seconds else None,
            "worst_sec": max(seconds, default=None),
        }
    return {"sizes": sizes}


def show(result: dict[str, Any]) -> None:
    """Print a summary of the trials."""
    for megabytes, found in result["sizes"].items():
        print(
            f"a state of {megabytes} MB: {found['saved']} of {found['trials']} jobs saved their "
            f"last step; on disk after: median {found['median_sec']:.2f} s, worst "
            f"{found['worst_sec']:.2f} s"
        )


def _try(megabytes: int, after_sec: float) -> float | None:
    """Return the seconds from SIGTERM to the checkpoint of the last step; None if there is none."""
    os.environ["PADDED_MB"] = str(megabytes)
    arguments = ["--model=padded:build", "--dataset=digits", "--balance=off", "--epochs=1000"]
    arguments.append("--global-batch-size=8")  # so that the first epoch lasts longer than the trial
    with (
        tempfile.TemporaryDirectory(prefix="kaitian-signals-") as folder,
        Job(Launch(2), Path(folder) / "run", arguments) as job,
    ):
        job.wait_for(_is_training, _STARTING_SEC)
        time.sleep(after_sec)
        at = time.time()
        job.signal(signal.SIGTERM)
        if job.wait(_SAVING_SEC) is None:
            return None
        last = max(line.step for line in job.lines if line.step)
        saved = [path for path in job.run_dir.rglob(f"{_STEP}*.json") if _number(path) >= last]
        return max(path.stat().st_mtime for path in saved) - at if saved else None


def _is_training(line: Line) -> bool:
    return line.step is not None and line.step >= _FIRST_STEP


def _number(path: Path) -> int:
    return int(path.stem.removeprefix(_STEP))
