"""Measures the downtime and the repeated steps after the loss of a host or of its link."""

from __future__ import annotations

import random
import re
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from recovering.figures import in_seconds, middle_and_worst, or_infinite
from recovering.job import Job, Launch, Line

_STARTING_SEC, _ENDING_SEC = 90.0, 120.0
_EARLIEST_STEP, _LATEST_STEP, _STEPS = 8, 20, 25
_STARTS_AGAIN = re.compile(r"kaitian-supervise: start 2 of 2")
TARGET_SEC, TARGET_STEPS = 20.0, 10


@dataclass(frozen=True)
class Trial:
    """One loss; times in seconds."""

    host: int
    how: str
    to_step: float | None
    """From the loss until the first new step; None if there is none."""
    to_first_step: float | None
    """From the loss until the first step, new or repeated; None if there is none."""
    repeated: int | None
    """Number of repeated steps; None if no step followed."""
    has_finished: bool


def measure(launch: Launch, arguments: list[str], trials: int, seed: int) -> dict[str, Any]:
    """Alternately kill a host and take its link down, each time in a new job."""
    choice, done = random.Random(seed), []
    print(" host  how       to the next step  to a new step  steps repeated  finished")
    for number in range(trials):
        done.append(_try(launch, arguments, choice, ("killed", "unplugged")[number % 2]))
        print(_row(done[-1]), flush=True)
    return _result(done)


def show(result: dict[str, Any]) -> None:
    """Print a summary of the trials."""
    for how, found in result["by_kind"].items():
        print(
            f"{how}: {found['finished']} of {found['trials']} finished; to the next step: median "
            f"{found['to_first_step_sec'][0]:.1f} s, worst {found['to_first_step_sec'][1]:.1f} s "
            f"(target: {TARGET_SEC:.0f} s); at most {found['most_repeated']} steps repeated "
            f"(target: {TARGET_STEPS})"
        )


def _try(launch: Launch, arguments: list[str], choice: random.Random, how: str) -> Trial:
    assert launch.hosts is not None
    host, step = choice.choice(launch.hosts.others), choice.randint(_EARLIEST_STEP, _LATEST_STEP)
    launch = replace(launch, restarts=1)
    lose = {"killed": launch.hosts.kill, "unplugged": launch.hosts.unplug}[how]
    with (
        tempfile.TemporaryDirectory(prefix="kaitian-hosts-") as folder,
        launch.hosts,
        Job(launch, Path(folder) / "run", [*arguments, f"--max-steps={_STEPS}"]) as job,
    ):
        job.wait_for(lambda line: line.step is not None and line.step >= step, _STARTING_SEC)
        at = time.perf_counter()
        lose(host)
        code = job.wait(_ENDING_SEC)
        return _judge(job, host, how, at, code)


def _judge(job: Job, host: int, how: str, at: float, code: int | None) -> Trial:
    again = next((line for line in job.lines if _STARTS_AGAIN.match(line.text)), None)
    after: list[Line] = []
    if again is not None:
        after = [line for line in job.lines if line.step and line.at > again.at]
    last = max(line.step for line in job.lines if line.step and line not in after)
    first = after[0] if after else None
    new = next((line for line in after if line.step > last), None)
    trial = Trial(
        host,
        how,
        new.at - at if new else None,
        first.at - at if first else None,
        last - first.step + 1 if first else None,
        code == 0 and job.summary().get("finished", False),
    )
    if not trial.has_finished:
        print(f"{how} after {at - job.began:.2f} s, exit code {code}: see {job.keep_output()}")
    return trial


def _row(trial: Trial) -> str:
    first, new = in_seconds(trial.to_first_step, 1), in_seconds(trial.to_step, 1)
    return (
        f"{trial.host:5}  {trial.how:9} {first:>16} {new:>14} "
        f"{trial.repeated!s:>15}  {trial.has_finished}"
    )


def _result(trials: list[Trial]) -> dict[str, Any]:
    return {
        "by_kind": {
            how: _figures([trial for trial in trials if trial.how == how])
            for how in dict.fromkeys(trial.how for trial in trials)
        },
        "each": [asdict(trial) for trial in trials],
    }


def _figures(trials: list[Trial]) -> dict[str, Any]:
    return {
        "trials": len(trials),
        "finished": sum(trial.has_finished for trial in trials),
        "to_first_step_sec": middle_and_worst(trial.to_first_step for trial in trials),
        "most_repeated": max(or_infinite(trial.repeated for trial in trials)),
    }
