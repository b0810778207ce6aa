"""Measures the downtime after the kill of a rank."""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from recovering.figures import in_seconds, middle_and_worst
from recovering.job import Job, Launch, Line, is_whole, kill, recovery_after

_STARTING_SEC, _TRAINING_SEC = 90.0, 40.0
_FIRST_STEPS = 2  # not counted: warm-up
_STEPS_BEFORE, _STEPS_TO_KILL_IN, _STEPS = 7, 4, 15
WEIGHTS_TOLERANCE = 1e-9  # relative to a tensor's largest weight
MEDIAN_TARGET_SEC, WORST_TARGET_SEC = 0.5, 2.0


Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trial:
    """One kill; times in seconds."""

    rank: int
    after_step: int
    """The last step printed before the kill."""
    normal_step: float
    """The median step time before the kill."""
    to_regroup: float | None
    """From the kill until the others report that they have recovered; None if they do not."""
    to_step: float | None
    """From the kill until the next step of the others; None if there is none."""
    noticed_to_step: float | None
    """`seconds_to_recover` of the job's summary."""
    has_recovered: bool
    """The run finished with exit code 0 and reported the lost rank."""
    is_whole: bool
    """No step was lost or repeated."""
    is_same: bool = True
    """The results equal those of a run without a kill, where they are compared."""

    @property
    def over(self) -> float | None:
        """Time to the next step beyond that of a normal step."""
        return None if self.to_step is None else self.to_step - self.normal_step


def measure(
    launch: Launch,
    arguments: list[str],
    trials: int,
    seed: int,
    is_same: Callable[[Path], bool] | None = None,
) -> dict[str, Any]:
    """Kill a random rank at a random moment, in each of `trials` jobs.

    Args:
        launch: how to start the ranks.
        arguments: the program's.
        trials: how many jobs.
        seed: determines which ranks are killed and when.
        is_same: whether the results in a run folder equal those of a run without a kill.
    """
    choice, done = random.Random(seed), []
    print("  killed rank  after step  normal step  to recover  to the next step  over  whole  same")
    while len(done) < trials:
        trial = _try(launch, arguments, choice, is_same)
        if trial is not None:
            done.append(trial)
            print(_row(trial), flush=True)
    return _result(done)


def train_undisturbed(launch: Launch, arguments: list[str], folder: Path) -> Weights:
    """Return the weights after the same training without a kill."""
    run_dir = folder / "run"
    with Job(launch, run_dir, [*arguments, f"--max-steps={_STEPS}"]) as job:
        if job.wait(_STARTING_SEC + _TRAINING_SEC) != 0:
            raise RuntimeError(f"the run without a kill failed: see {job.keep_output()}")
    return weights_of(run_dir)


def has_weights(expected: Weights, run_dir: Path) -> bool:
    """Return whether a run's final weights are these, up to rounding."""
    found = weights_of(run_dir)
    off = [
        (found[name] - value).abs().max() / value.abs().max() for name, value in expected.items()
    ]
    return bool(torch.stack(off).max() <= WEIGHTS_TOLERANCE)


def weights_of(run_dir: Path) -> Weights:
    """Return a run's final weights."""
    weights: Weights = torch.load(run_dir / "checkpoints" / "model.pt", weights_only=True)
    return weights


def show(result: dict[str, Any]) -> None:
    """Print a summary of the trials."""
    print(
        f"{result['recovered']} of {result['trials']} recovered, {result['whole']} without a step "
        f"lost or repeated, {result['same']} with the same results as without a kill, where they "
        f"are compared\nkill to the next step, over a normal one of "
        f"{result['normal_step_sec']:.2f} s: median {result['over_sec'][0]:.2f} s, worst "
        f"{result['over_sec'][1]:.2f} s (target: {MEDIAN_TARGET_SEC} s, {WORST_TARGET_SEC} s)\n"
        f"kill to that step: median {result['to_step_sec'][0]:.2f} s, worst "
        f"{result['to_step_sec'][1]:.2f} s; kill to recovery: median "
        f"{result['to_regroup_sec'][0]:.2f} s, worst {result['to_regroup_sec'][1]:.2f} s"
    )


def _try(
    launch: Launch,
    arguments: list[str],
    choice: random.Random,
    is_same: Callable[[Path], bool] | None,
) -> Trial | None:
    """Return what a kill did; None if the job was done before it."""
    rank = choice.randrange(launch.ranks)
    with tempfile.TemporaryDirectory(prefix="kaitian-kills-") as folder:
        given = [*arguments, f"--max-steps={_STEPS}"]
        with Job(launch, Path(folder) / "run", given) as job:
            job.wait_for(lambda line: line.step == _STEPS_BEFORE, _STARTING_SEC)
            normal, pid = _normal_step(job.lines), job.pid_of(rank)
            time.sleep(choice.uniform(0, _STEPS_TO_KILL_IN * normal))
            at = kill(pid)
            if any(line.step == _STEPS for line in job.lines):
                return None
            code = job.wait(_TRAINING_SEC)
            trial = _judge(job, rank, at, code)
            if is_same is not None:
                trial = replace(trial, is_same=trial.has_recovered and is_same(job.run_dir))
            if not (trial.has_recovered and trial.is_whole and trial.is_same):
                seconds, kept = at - job.began, job.keep_output()
                print(f"killed after {seconds:.2f} s, exit code {code}: see {kept}")
            return trial


def _normal_step(lines: list[Line]) -> float:
    times = [line.at for line in lines if line.step is not None][_FIRST_STEPS:]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def _judge(job: Job, rank: int, at: float, code: int | None) -> Trial:
    before = [line for line in job.lines if line.at < at]
    recovery = recovery_after(job.lines, at)
    summary = job.summary()
    failures = summary.get("failures", [])
    named = [lost["rank"] for failure in failures for lost in failure["ranks"]]
    return Trial(
        rank,
        max(line.step or 0 for line in before),
        _normal_step(before),
        recovery[0] if recovery else None,
        recovery[1] if recovery else None,
        failures[0]["seconds_to_recover"] if failures else None,
        code == 0 and summary.get("finished", False) and named == [rank],
        is_whole(job.lines, _STEPS),
    )


def _row(trial: Trial) -> str:
    return (
        f"{trial.rank:13} {trial.after_step:11} {in_seconds(trial.normal_step):>12} "
        f"{in_seconds(trial.to_regroup):>11} {in_seconds(trial.to_step):>17} "
        f"{'' if trial.over is None else f'{trial.over:.2f}':>5}  {trial.is_whole!s:5}  "
        f"{trial.is_same}"
    )


def _result(trials: list[Trial]) -> dict[str, Any]:
    return {
        "trials": len(trials),
        "recovered": sum(trial.has_recovered for trial in trials),
        "whole": sum(trial.is_whole for trial in trials),
        "same": sum(trial.is_same for trial in trials),
        "normal_step_sec": statistics.median(trial.normal_step for trial in trials),
        "over_sec": middle_and_worst([trial.over for trial in trials]),
        "to_step_sec": middle_and_worst([trial.to_step for trial in trials]),
        "to_regroup_sec": middle_and_worst([trial.to_regroup for trial in trials]),
        "each": [asdict(trial) for trial in trials],
    }
