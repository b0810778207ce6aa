"""Measures the time without a step, and the repeated steps, where a host joins a job."""

from __future__ import annotations

import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recovering.figures import in_seconds, middle_and_worst, or_infinite
from recovering.host_losses import TARGET_SEC, TARGET_STEPS
from recovering.job import Job, Launch

_STARTING_SEC, _ENDING_SEC = 90.0, 120.0
_FIRST_STEP, _STEPS = 8, 40
_STARTS_AGAIN = re.compile(r"kaitian-supervise: start 2:")


@dataclass(frozen=True)
class Trial:
    """A host that joins; times in seconds."""

    noticed: float
    """From the change of the hosts file until the last step before the job ends for it."""
    without_step: float | None
    """From that step until the next one; None if there is none."""
    repeated: int | None
    """Number of repeated steps; None if no step followed."""
    has_finished: bool


def measure(launch: Launch, arguments: list[str], trials: int) -> dict[str, Any]:
    """Add the last host to the hosts file of a job on the others, each time in a new job."""
    print(" noticed after  without a step  steps repeated  finished")
    done = []
    for _ in range(trials):
        done.append(_try(launch, arguments))
        trial = done[-1]
        print(
            f"{in_seconds(trial.noticed, 1):>14} {in_seconds(trial.without_step, 1):>15} "
            f"{trial.repeated!s:>15}  {trial.has_finished}",
            flush=True,
        )
    return {
        "trials": trials,
        "finished": sum(trial.has_finished for trial in done),
        "without_step_sec": middle_and_worst(trial.without_step for trial in done),
        "most_repeated": max(or_infinite(trial.repeated for trial in done)),
        "each": [asdict(trial) for trial in done],
    }


def show(result: dict[str, Any]) -> None:
    """Print a summary of the trials."""
    middle, worst = result["without_step_sec"]
    print(
        f"{result['finished']} of {result['trials']} finished; without a step: median "
        f"{middle:.1f} s, worst {worst:.1f} s (target: {TARGET_SEC:.0f} s); at most "
        f"{result['most_repeated']} steps repeated (target: {TARGET_STEPS})"
    )


def _try(launch: Launch, arguments: list[str]) -> Trial:
    assert launch.hosts is not None
    lines = launch.hosts.hostfile.read_text().splitlines(keepends=True)
    with (
        tempfile.TemporaryDirectory(prefix="kaitian-hosts-") as folder,
        launch.hosts,
    ):
        file = Path(folder) / "hosts.txt"
        file.write_text("".join(lines[:-1]))
        words = [*arguments, f"--max-steps={_STEPS}"]
        with Job(launch.with_hosts_file(file), Path(folder) / "run", words) as job:
            at = job.wait_for(lambda line: line.step == _FIRST_STEP, _STARTING_SEC).at
            file.write_text("".join(lines))
            code = job.wait(_ENDING_SEC)
            return _judge(job, at, code)


def _judge(job: Job, changed_at: float, code: int | None) -> Trial:
    again = next((line.at for line in job.lines if _STARTS_AGAIN.match(line.text)), None)
    steps = [(line.at, line.step) for line in job.lines if line.step]
    before = [step for step in steps if again is None or step[0] < again]
    after = steps[len(before) :]
    last_at, last = before[-1]
    trial = Trial(
        last_at - changed_at,
        after[0][0] - last_at if after else None,
        last - after[0][1] + 1 if after else None,
        code == 0 and job.summary().get("finished", False),
    )
    if not trial.has_finished or not after:
        print(f"exit code {code}: see {job.keep_output()}")
    return trial
