"""Readings and evaluations as numbers by name, for programs that plot them."""

from __future__ import annotations

from collections.abc import Mapping

from kaitian_mpi.observe.reading import Evaluated, Logged, Reading

PHASES = ("compute", "wait", "data", "forward", "backward", "optimizer")


def of_reading(reading: Reading) -> dict[str, float]:
    """Return a reading's numbers; times are mean seconds per step, by phase and world rank."""
    found = {
        "loss/train": reading.loss,
        "learning_rate": reading.learning_rate,
        "epoch": reading.epoch,
        "throughput/samples_per_sec": reading.samples_per_sec,
        "throughput/step_time_sec": reading.step_time_sec,
    }
    for rank, size in zip(reading.ranks, reading.batch_sizes, strict=True):
        found[f"batch_size/rank_{rank}"] = size
    for phase in PHASES:
        seconds = getattr(reading, f"{phase}_time_sec")
        for rank, value in zip(reading.ranks, seconds or [], strict=bool(seconds)):
            found[f"time/{phase}/rank_{rank}"] = value
    return found | _own(reading.logged)


def of_evaluation(evaluated: Evaluated) -> dict[str, float]:
    """Return an evaluation's numbers, such as `accuracy/validation`."""
    return {f"{name}/validation": value for name, value in evaluated.values.items()}


def of_logged(logged: Logged) -> dict[str, float]:
    """Return the script's own figures."""
    return _own(logged.values)


def _own(values: Mapping[str, float]) -> dict[str, float]:
    return {f"logged/{name}": value for name, value in values.items()}
