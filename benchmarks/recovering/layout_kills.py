"""Kills, or stops, a random rank at a random moment of a job in each layout."""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from recovering.figures import in_seconds, middle_and_worst
from recovering.job import Job, Launch, Line, recovery_after
from recovering.kills import Weights, has_weights, weights_of

_LIMITED = ["--width=512", "--emulate-memory=0:60MB,1:60MB,2:60MB"]
LAYOUTS = {
    "replicate": ["--layout=replicate"],
    "shard": ["--layout=shard", "--no-mirrors"],
    "shard with mirrors": ["--layout=shard"],
    "sharded parameters": ["--layout=shard", *_LIMITED],
    "pipeline of replicas": ["--layout=pipeline"],
    "pipeline of stages": ["--layout=pipeline", *_LIMITED],
    "experts": ["--layout=experts", "--no-mirrors"],
    "experts with mirrors": ["--layout=experts"],
}
_STEPS, _STEP_TIMEOUT_SEC = 24, 15
_STEPS_BEFORE = 3
_ARGUMENTS = [
    *(f"--max-steps={_STEPS}", f"--step-timeout={_STEP_TIMEOUT_SEC}"),
    *("--checkpoint-every=6", "--global-batch-size=128", "--width=256"),
    # The ranks are benchmarked, and later rebalanced.
    *("--balance=adaptive", "--benchmark-seconds=0.5", "--emulate-slowdown=1:3@9"),
]
_SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
_LIMIT_SEC, _LEAVING_SEC = 400.0, 10.0


@dataclass(frozen=True)
class Moment:
    """When to send a signal: some time after the job has printed so many lines."""

    lines: int
    after_sec: float


@dataclass(frozen=True)
class Ending:
    """How a job ended of which a rank was killed or stopped."""

    moment: Moment
    last_line: str
    """The last that the job had printed before the signal."""
    rank: int
    code: int | None
    """None if it did not end in time."""
    seconds: float
    """From the signal to the end of the job."""
    lost: list[int]
    """The ranks that its summary has as lost."""
    is_finished: bool
    is_same: bool
    """Whether the weights are those of a run without a signal; where it did not finish, those of
    the same command with `--resume auto`."""
    left: list[str]
    """Processes that outlived the job."""
    over_sec: float | None = None
    """From the signal to the next step, over a median step before; None if one of them is none."""

    @property
    def word(self) -> str:
        """One word on it: WRONG if the job hung, has other weights or has left something."""
        if self.code is None or not self.is_same or self.left or self.lost not in ([], [self.rank]):
            return "WRONG"
        if not self.is_finished:
            return "resumed"
        return "survived" if self.lost else "unharmed"


def measure(
    ranks: int,
    trials: int,
    seed: int,
    script: tuple[str, ...],
    layouts: Mapping[str, list[str]] = LAYOUTS,
    amid_steps: bool = False,
) -> dict[str, Any]:
    """Return how many jobs ended in which way, and what a kill has cost, by layout and signal.

    With `amid_steps`, ranks are killed between the first and the last step alone, so that each
    trial gives a time.
    """
    launch, choice = Launch(ranks, script=script), random.Random(seed)
    undisturbed = {name: _run_undisturbed(launch, flags) for name, flags in layouts.items()}
    counts = {f"{name} {n.name}": Counter[str]() for name in layouts for n in _SIGNALS}
    costs: dict[str, list[float]] = {key: [] for key in counts}
    for trial in range(trials):  # one in each layout: whenever it is ended, it has tried them alike
        for name, flags in layouts.items():
            whole = undisturbed[name]
            for number in _SIGNALS if trial % 5 == 0 and not amid_steps else _SIGNALS[:1]:
                if amid_steps:
                    moment = whole.choose_step(choice)
                else:
                    moment = whole.choose_moment(choice, in_setup=trial % 2 == 1)
                rank = choice.randrange(ranks)
                ending = _try(launch, flags, rank, moment, number, whole.weights)
                print(f"{name} {number.name} {ending}: {ending.word}", flush=True)
                counts[f"{name} {number.name}"][ending.word] += 1
                if ending.over_sec is not None:
                    costs[f"{name} {number.name}"].append(ending.over_sec)
    return {
        key: {"endings": dict(count), "over_sec": middle_and_worst(costs[key] or [None])}
        for key, count in counts.items()
        if count
    }


def show(result: dict[str, Any]) -> None:
    """Print the result by layout."""
    for name, found in result.items():
        endings = ", ".join(f"{count} {word}" for word, count in found["endings"].items())
        median, worst = map(in_seconds, found["over_sec"])
        print(f"{name}: {endings}; signal to the next step, over one: {median}, worst {worst}")


@dataclass(frozen=True)
class Undisturbed:
    """A run without a signal."""

    times: list[float]
    """When each line came after the start, and when the job ended."""
    steps: list[float]
    """When the line of each step came."""
    weights: Weights

    def choose_moment(self, choice: random.Random, in_setup: bool) -> Moment:
        """Return a random moment of the setup, or of the training with its end."""
        span = (0.0, self.steps[0]) if in_setup else (self.steps[0], self.times[-1])
        return self._moment(choice.uniform(*span))

    def choose_step(self, choice: random.Random) -> Moment:
        """Return a random moment after enough steps to compare with and before the last."""
        return self._moment(choice.uniform(self.steps[_STEPS_BEFORE], self.steps[-2]))

    def _moment(self, at: float) -> Moment:
        lines = sum(time <= at for time in self.times)
        return Moment(lines, at - (self.times[lines - 1] if lines else 0))


def _run_undisturbed(launch: Launch, flags: list[str]) -> Undisturbed:
    with (
        tempfile.TemporaryDirectory(prefix="kaitian-undisturbed-") as folder,
        Job(launch, Path(folder) / "run", [*_ARGUMENTS, *flags]) as job,
    ):
        if job.wait(_LIMIT_SEC) != 0:
            raise RuntimeError(f"the run without a kill failed: see {job.keep_output()}")
        steps = [line.at - job.began for line in job.lines if line.step is not None]
        times = [line.at - job.began for line in job.lines]
        ended = time.perf_counter() - job.began
        return Undisturbed([*times, ended], steps, weights_of(job.run_dir))


def _try(
    launch: Launch,
    flags: list[str],
    rank: int,
    moment: Moment,
    number: signal.Signals,
    weights: Weights,
) -> Ending:
    """Return how a job ended; print where its output is."""
    arguments = [*_ARGUMENTS, *flags]
    with tempfile.TemporaryDirectory(prefix="kaitian-kills-") as folder:
        run_dir, is_same = Path(folder) / "run", False
        with Job(launch, run_dir, arguments) as job:
            ranks = _wait_until(job, launch.ranks, moment)
            last_line, began = job.lines[-1].text if job.lines else "", time.perf_counter()
            with suppress(IndexError, ProcessLookupError):  # it has ended
                os.kill(ranks[rank], number)
            started = _with_all_started(ranks)
            code, seconds = job.wait(_LIMIT_SEC), time.perf_counter() - began
            over_sec = _over_a_step(job.lines, began)
            _, left = psutil.wait_procs(started, timeout=_LEAVING_SEC)
            summary = job.summary()
            print(f"see {job.keep_output()}", flush=True)
        is_finished = summary.get("finished", False)
        if code is not None and not is_finished:
            with Job(launch, run_dir, [*arguments, "--resume=auto"]) as again:
                if again.wait(_LIMIT_SEC) == 0:
                    is_same = has_weights(weights, run_dir)
                else:
                    print(f"not resumed: see {again.keep_output()}", flush=True)
        elif code is not None:
            is_same = has_weights(weights, run_dir)
        failures = summary.get("failures", [])
        lost = [one["rank"] for failure in failures for one in failure["ranks"]]
        names = [str(process) for process in left]
        ended = code, seconds, lost, is_finished, is_same, names
        return Ending(moment, last_line, rank, *ended, over_sec)


def _over_a_step(lines: list[Line], at: float) -> float | None:
    """Return the seconds from a signal in training to the next step after the loss, over a step."""
    recovery = recovery_after(lines, at)
    before = [line.at for line in lines if line.step is not None and line.at < at]
    if recovery is None or len(before) < _STEPS_BEFORE:
        return None
    return recovery[1] - statistics.median(b - a for a, b in pairwise(before))


def _wait_until(job: Job, ranks: int, moment: Moment) -> list[int]:
    """Wait for a moment of a job, and until its ranks are there; return these."""
    while len(job.lines) < moment.lines and job.wait(0) is None:
        time.sleep(0.001)
    time.sleep(moment.after_sec)
    while job.wait(0) is None:
        with suppress(RuntimeError):  # it has not been started
            return [job.pid_of(rank) for rank in range(ranks)]
    return []


def _with_all_started(ranks: list[int]) -> list[psutil.Process]:
    found = []
    for pid in ranks:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    return found
