"""Compares training with many killed ranks, replaced by spares, with undisturbed training."""

from __future__ import annotations

import dataclasses
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from recovering.job import Job, Launch, is_whole, kill, recovery_after

_STEPS, _EVERY, _SPREAD = 500, 50, 10
_TRAINING = ["--model=cnn", "--dataset=digits", "--global-batch-size=64", "--epochs=1000"]
_STARTING_SEC, _RUNNING_SEC = 120.0, 60.0
_SEEDS = (0, 1, 2)


def measure(launch: Launch, seed: int) -> dict[str, Any]:
    """Train with each seed undisturbed, and with the first one disturbed.

    Args:
        launch: how to start the active ranks; one spare per kill is added.
        seed: determines which ranks are killed and when.
    """
    undisturbed = []
    for number in _SEEDS:
        undisturbed.append(_train(launch, number, [], random.Random()))
        print(_row(f"undisturbed, seed {number}", undisturbed[-1]), flush=True)
    choice = random.Random(seed)
    kills = [step + choice.randint(-_SPREAD, _SPREAD) for step in range(_EVERY, _STEPS - 1, _EVERY)]
    disturbed = _train(launch, _SEEDS[0], kills, choice)
    print(_row(f"{len(kills)} kills, seed {_SEEDS[0]}", disturbed), flush=True)
    return {
        "disturbed": disturbed,
        "undisturbed": undisturbed,
        "loss": _compare(disturbed, undisturbed, "val_loss"),
        "accuracy": _compare(disturbed, undisturbed, "val_accuracy"),
    }


def show(result: dict[str, Any]) -> None:
    """Print whether the kills changed the model more than another seed does."""
    run = result["disturbed"]
    seconds = run["kill_to_step_sec"] or [float("inf")]
    print(
        f"{run['failures']} of {len(run['kills'])} kills survived, finished: {run['finished']}, no "
        f"step lost or repeated: {run['whole']}; kill to the next step: median "
        f"{statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s"
    )
    for name in ("loss", "accuracy"):
        part = result[name]
        verdict = "within" if part["is_within"] else "NOT within"
        print(
            f"held-out {name}: {part['disturbed']:.4f} with kills, {part['low']:.4f} to "
            f"{part['high']:.4f} without; off the same seed by {part['off_same_seed']:+.4f}, off "
            f"the mean of seeds by {part['off_mean']:+.4f}: {verdict} the seeds' spread of "
            f"{part['high'] - part['low']:.4f}"
        )


def _train(launch: Launch, seed: int, kills: list[int], choice: random.Random) -> dict[str, Any]:
    given = [*_TRAINING, f"--max-steps={_STEPS}", f"--seed={seed}", "--balance=off"]
    launch = dataclasses.replace(launch, ranks=launch.ranks + len(kills))
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="kaitian-soak-") as folder,
        Job(launch, Path(folder) / "run", [*given, f"--spares={len(kills)}"]) as job,
    ):
        job.wait_for(lambda line: line.step is not None, _STARTING_SEC)
        killed = [_kill_at(job, step, choice) for step in kills]
        code = job.wait(_RUNNING_SEC)
        summary = job.summary()
        failures = summary.get("failures", [])
        recoveries = [recovery_after(job.lines, one["at"]) for one in killed]
        whole = is_whole(job.lines, _STEPS)
        finished = code == 0 and summary.get("finished", False)
        if not (finished and whole):
            print(f"exit code {code}: see {job.keep_output()}")
    return {
        "finished": finished,
        "seconds": round(time.perf_counter() - began, 1),
        "kills": killed,
        "failures": sum(len(failure["ranks"]) for failure in failures),
        "kill_to_step_sec": [found[1] for found in recoveries if found],
        "whole": whole,
        "val_loss": summary.get("val_loss", float("nan")),
        "val_accuracy": summary.get("val_accuracy", float("nan")),
    }


def _kill_at(job: Job, step: int, choice: random.Random) -> dict[str, float]:
    """Kill one of the active ranks shortly after a step."""
    job.wait_for(lambda line: (line.step or 0) >= step, _RUNNING_SEC)
    rank = choice.choice(job.summary()["ranks"])
    pid = job.pid_of(rank)
    time.sleep(choice.uniform(0, 0.1))
    return {"rank": rank, "after_step": step, "at": kill(pid)}


def _compare(
    disturbed: dict[str, Any], undisturbed: list[dict[str, Any]], key: str
) -> dict[str, Any]:
    values = [run[key] for run in undisturbed]
    low, high = min(values), max(values)
    off_mean = disturbed[key] - statistics.mean(values)
    off_same_seed = disturbed[key] - values[0]
    return {
        "disturbed": disturbed[key],
        "low": low,
        "high": high,
        "off_mean": off_mean,
        "off_same_seed": off_same_seed,
        "is_within": disturbed["finished"] and abs(off_mean) <= high - low,
    }


def _row(name: str, run: dict[str, Any]) -> str:
    return (
        f"{name:20} held-out loss {run['val_loss']:.4f}, accuracy {run['val_accuracy']:.4f}, "
        f"{run['seconds']:.0f} s"
    )
