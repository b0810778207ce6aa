"""A job's measured costs, their file, and what is forecast and predicted from them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kaitian_mpi.balance.communication import (
    MeasuredAllreduce,
    ddp_buckets,
    scale_allreduce,
)
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.forecast import (
    MAX_SAMPLES,
    Cohort,
    SubsetForecasts,
    forecast_subsets,
    ranks_per_kind,
    scale_cohorts,
)
from kaitian_mpi.balance.layouts import REPLICATE, LayoutJob, Prediction, predict_layouts
from kaitian_mpi.balance.records import rebuild
from kaitian_mpi.errors import UserError

_VERSION = 5
_MAX_BYTES = 2**42  # 10**12 float32 parameters
_MAX_SEC = 1e9  # so that no sum overflows
_MIN_SEC = 1e-12  # per sample, so that no rate overflows


@dataclass(frozen=True)
class MeasuredRank:
    """A rank's device and its cost."""

    rank: int
    host: str
    kind: str
    device: str
    cost: RankCost
    fit_error: float
    """Root mean square of the relative errors of the cost model: 0.02 for 2%."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The measurements of a job's ranks."""

    model: str
    emulated: bool
    gradient_bytes: int
    """Bytes of the whole model's gradients, as they are reduced."""
    global_batch_size: int
    """Samples per step of the job."""
    ranks: tuple[MeasuredRank, ...]
    allreduces: tuple[MeasuredAllreduce, ...]
    layouts: LayoutJob | None = None
    """The measurements for comparing layouts; None if the job did not measure them."""

    def cohorts(self) -> list[Cohort]:
        """Return a cohort for each measured rank."""
        return [Cohort(rank.kind, rank.cost) for rank in self.ranks]

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file that `read_measurements` reads."""
        return {"version": _VERSION, **asdict(self)}


def read_measurements(path: Path) -> Measurements:
    """Read a file written by `kaitian-plan --save`.

    Raises:
        UserError: the file cannot be read, or is not such a file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("version") != _VERSION:
            raise ValueError("another version of kaitian-mpi wrote it")
        measured: Measurements = rebuild(Measurements, content)
        _check(measured)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); name a file saved with kaitian-plan --save"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path}: is not a valid file of measurements ({type(error).__name__}: "
            f"{ascii(str(error))[:100]}); save it again with kaitian-plan --save"
        ) from error
    return measured


def _check(measured: Measurements) -> None:
    """Raise ValueError for values that cannot be forecast from; TypeError for other types."""
    counts = ranks_per_kind(measured.cohorts())
    if not measured.ranks or not measured.allreduces:
        raise ValueError("no ranks or allreduces")
    if measured.layouts is not None:
        measured.layouts.check()
    _check_range("gradient_bytes", measured.gradient_bytes, 0, _MAX_BYTES, int)
    _check_range("global_batch_size", measured.global_batch_size, 1, MAX_SAMPLES, int)
    for rank in measured.ranks:
        _check_range("alpha_sec", rank.cost.alpha_sec, 0, _MAX_SEC)
        _check_range("beta_sec", rank.cost.beta_sec, _MIN_SEC, _MAX_SEC)
        if rank.cost.largest_micro_batch is not None:
            _check_range("largest_micro_batch", rank.cost.largest_micro_batch, 1, MAX_SAMPLES, int)
    for entry in measured.allreduces:
        _check_range("latency_sec", entry.cost.latency_sec, 0, _MAX_SEC)
        _check_range("sec_per_byte", entry.cost.sec_per_byte, 0, _MAX_SEC)
        for kind, ranks in entry.ranks_per_kind.items():
            _check_range("ranks_per_kind", ranks, 1, counts.get(kind, 0), int)
    for text in (measured.model, *counts):
        if not text.isprintable():  # it is printed
            raise ValueError(f"unprintable {text!r}")


def _check_range(name: str, value: float, low: float, high: float, kind: Any = int | float) -> None:
    if not isinstance(value, kind) or not low <= value <= high:  # False for NaN
        raise ValueError(f"{name} is {value!r}")


def plan_job(
    measured: Measurements, world: dict[str, int] | None, global_batch_size: int | None = None
) -> SubsetForecasts:
    """Forecast a job; by default, the measured ranks with the measured global batch per rank."""
    cohorts = measured.cohorts() if world is None else scale_cohorts(measured.cohorts(), world)
    if global_batch_size is None:
        ranks = sum(cohort.ranks for cohort in cohorts)
        scaled = round(measured.global_batch_size * ranks / len(measured.ranks))
        global_batch_size = min(max(1, scaled), MAX_SAMPLES)
    buckets = ddp_buckets(measured.gradient_bytes)
    return forecast_subsets(cohorts, global_batch_size, buckets, measured.allreduces)


def predict_world(measured: Measurements, job: SubsetForecasts) -> list[Prediction]:
    """Predict each layout's step and memory in the job's world; empty if that was not measured.

    Layouts are compared by the times of single layers. Their sum is not quite the measured time of
    a step, so all are scaled by what that is for replicate, whose step the job has forecast.
    """
    if measured.layouts is None:
        return []
    cost = scale_allreduce(measured.allreduces, job.world)
    layouts = measured.layouts.in_world(job.world, job.global_batch_size, cost)
    predictions = predict_layouts(layouts)
    by_layers = next(
        prediction.step_sec for prediction in predictions if prediction.layout == REPLICATE
    )
    factor = job.whole.step_sec / by_layers if by_layers else 1.0
    return [
        replace(
            prediction,
            step_sec=None if prediction.step_sec is None else factor * prediction.step_sec,
        )
        for prediction in predictions
    ]
