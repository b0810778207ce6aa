"""Kills, or stops, a random rank at a random moment of a training in each layout."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recovering.job import Job, Launch
from recovering.kills import has_weights, weights_of

LAYOUTS = {
    "shard": ["--layout=shard", "--no-mirrors"],
    "shard with mirrors": ["--layout=shard"],
    "pipeline": ["--layout=pipeline"],
}
_STEPS, _CHECKPOINT_EVERY, _STEP_TIMEOUT_SEC = 40, 5, 15
_LIMIT_SEC = 240.0


@dataclass(frozen=True)
class Ending:
    """How a job ended of which a rank was killed or stopped."""

    after_sec: float
    """From the job's first line to the signal."""
    rank: int
    code: int | None
    """None if it did not end in time."""
    names_rank: bool
    """Whether its summary has the rank, alone, as lost."""
    is_same: bool
    """Whether the weights are those of a run without a signal."""

    @property
    def is_good(self) -> bool:
        """Whether the others have trained to the end, as if nothing had happened."""
        return self.code == 0 and self.names_rank and self.is_same


def measure(ranks: int, trials: int, seed: int, script: tuple[str, ...]) -> dict[str, Any]:
    """Return how many of so many jobs survived, by layout and signal."""
    result = {}
    for name, flags in LAYOUTS.items():
        launch, given = Launch(ranks, script=script), [*_arguments(), *flags]
        with tempfile.TemporaryDirectory(prefix="kaitian-undisturbed-") as folder:
            with Job(launch, Path(folder) / "run", given) as job:
                first = job.wait_for(lambda line: True, _LIMIT_SEC)
                if job.wait(_LIMIT_SEC) != 0:
                    raise RuntimeError(f"the run without a kill failed: see {job.keep_output()}")
                lasts = job.lines[-1].at - first.at
            weights = weights_of(Path(folder) / "run")
        for number in (signal.SIGKILL, signal.SIGSTOP):
            choice, ended = random.Random(seed), list[Ending]()
            while len(ended) < (trials if number == signal.SIGKILL else max(1, trials // 5)):
                ending = _try(launch, given, choice, number, lasts, weights)
                if ending is not None:
                    ended.append(ending)
                    text = "survived" if ending.is_good else "WRONG"
                    print(f"{name} {number.name} {ending}: {text}", flush=True)
            survived = sum(ending.is_good for ending in ended)
            result[f"{name} {number.name}"] = [survived, len(ended)]
    return result


def show(result: dict[str, Any]) -> None:
    """Print the result by layout."""
    for name, (survived, count) in result.items():
        print(f"{name}: {survived} of {count} survived, with the weights of an undisturbed run")


def _arguments() -> list[str]:
    lengths = f"--max-steps={_STEPS}", f"--checkpoint-every={_CHECKPOINT_EVERY}"
    timeout = f"--step-timeout={_STEP_TIMEOUT_SEC}"
    return [*lengths, timeout, "--global-batch-size=64", "--width=256"]


def _try(
    launch: Launch,
    given: list[str],
    choice: random.Random,
    number: signal.Signals,
    lasts: float,
    weights: Any,
) -> Ending | None:
    """Return how a job ended; None if it was done before the signal."""
    rank = choice.randrange(launch.ranks)
    with (
        tempfile.TemporaryDirectory(prefix="kaitian-kills-") as folder,
        Job(launch, Path(folder) / "run", given) as job,
    ):
        first = job.wait_for(lambda line: True, _LIMIT_SEC)
        pid = job.pid_of(rank)
        if number == signal.SIGSTOP:  # before the first step, the limit is much longer
            job.wait_for(lambda line: line.step == 1, _LIMIT_SEC)
            lasts /= 4
        time.sleep(choice.uniform(0, lasts))
        if any(line.step == _STEPS for line in job.lines) or job.wait(0) is not None:
            return None
        os.kill(pid, number)
        after = time.perf_counter() - first.at
        code = job.wait(_LIMIT_SEC)
        failures = job.summary().get("failures", [])
        lost = [one["rank"] for failure in failures for one in failure["ranks"]]
        is_same = code == 0 and has_weights(weights, job.run_dir)
        ending = Ending(after, rank, code, lost == [rank], is_same)
        if not ending.is_good:
            print(f"see {job.keep_output()}")
        return ending
