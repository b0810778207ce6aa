"""A job that is forecast from measurements: `kaitian-plan`'s result, and its JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kaitian_mpi.balance.communication import ddp_buckets
from kaitian_mpi.balance.forecast import (
    Forecast,
    SubsetForecasts,
    forecast_subsets,
    ranks_per_kind,
    scale_cohorts,
)
from kaitian_mpi.balance.measurements import MAX_SAMPLES, Measurements
from kaitian_mpi.errors import UserError

MAX_RANKS = 100_000


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """A job that is forecast."""

    measured: Measurements
    world: dict[str, int]
    """Ranks of each kind."""
    global_batch_size: int
    batch_origin: str
    """How the global batch size was chosen, for the output."""
    subsets: SubsetForecasts


def plan_job(
    measured: Measurements, world: dict[str, int] | None, global_batch_size: int | None = None
) -> PlannedJob:
    """Forecast a job.

    Args:
        measured: the costs.
        world: the ranks of each kind; None for the ranks that were measured.
        global_batch_size: samples per step; None for the measured job's, scaled with the ranks.

    Raises:
        UserError: a kind or an allreduce was not measured.
    """
    cohorts = measured.cohorts() if world is None else scale_cohorts(measured.cohorts(), world)
    counts = ranks_per_kind(cohorts)
    origin = "as given"
    if global_batch_size is None:
        scaled = round(measured.global_batch_size * sum(counts.values()) / len(measured.ranks))
        global_batch_size = min(max(1, scaled), MAX_SAMPLES)
        ranks = count(len(measured.ranks), "measured rank")
        is_larger = sum(counts.values()) != len(measured.ranks)
        origin = f"{measured.global_batch_size:,} on {ranks}" + (", scaled" if is_larger else "")
    buckets = ddp_buckets(measured.gradient_bytes)
    return PlannedJob(
        measured=measured,
        world=counts,
        global_batch_size=global_batch_size,
        batch_origin=origin,
        subsets=forecast_subsets(cohorts, global_batch_size, buckets, measured.allreduces),
    )


def parse_world(text: str) -> dict[str, int]:
    """Parse `8xcuda,32xcpu` into the number of ranks of each kind.

    Raises:
        UserError: the text is malformed, names a kind twice, or has too many ranks.
    """
    world: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"0*([1-9][0-9]{0,8})x(\S+)", part.strip())
        if match is None:
            raise UserError(
                f"--world: {part.strip()!r} is not a number of ranks, an x and a kind; write it "
                "like 8xcuda,32xcpu"
            )
        if match[2] in world:
            raise UserError(f"--world names {match[2]} twice; add the numbers up")
        world[match[2]] = int(match[1])
    if sum(world.values()) > MAX_RANKS:
        raise UserError(
            f"--world has {sum(world.values()):,} ranks; give at most {MAX_RANKS:,} in all"
        )
    return world


@dataclass(frozen=True)
class KindRow:
    """The forecast for one kind's ranks, per step."""

    kind: str
    ranks: int
    idle: int
    """The number of ranks without samples."""
    least: int
    """The fewest samples of any of these ranks."""
    most: int
    """The most samples of any of these ranks."""
    compute_sec: float
    """Compute time of the slowest of these ranks."""


def kind_rows(whole: Forecast) -> list[KindRow]:
    """Summarize a forecast by kind."""
    rows = []
    for kind in dict.fromkeys(share.cohort.kind for share in whole.shares):
        shares = [share for share in whole.shares if share.cohort.kind == kind]
        rows.append(
            KindRow(
                kind=kind,
                ranks=sum(share.ranks for share in shares),
                idle=sum(share.ranks for share in shares if share.samples == 0),
                least=min(share.samples for share in shares),
                most=max(share.samples for share in shares),
                compute_sec=max(share.seconds for share in shares),
            )
        )
    return rows


def to_json(job: PlannedJob) -> dict[str, Any]:
    """Return the forecast as the content of the --json file."""
    subsets = job.subsets
    return {
        "version": 1,
        "model": job.measured.model,
        "emulated": job.measured.emulated,
        "world": job.world,
        "global_batch_size": job.global_batch_size,
        "forecast": _forecast_to_json(subsets.whole)
        | {"bottleneck": subsets.whole.bottleneck, "losses": subsets.whole.losses},
        "kinds": [
            {
                "kind": row.kind,
                "ranks": row.ranks,
                "ranks_without_samples": row.idle,
                "samples_per_step_min": row.least,
                "samples_per_step_max": row.most,
                "compute_sec": row.compute_sec,
                "gain": subsets.gain(row.kind),
            }
            for row in kind_rows(subsets.whole)
        ],
        "plan": [
            {"kind": share.cohort.kind, "ranks": share.ranks, "samples_per_step": share.samples}
            for share in subsets.whole.shares
        ],
        "subsets": [
            {"kinds": list(kinds)} | _forecast_to_json(forecast)
            for kinds, forecast in subsets.forecasts.items()
        ],
        "best": list(subsets.best),
        "notes": list(subsets.notes),
    }


def _forecast_to_json(forecast: Forecast) -> dict[str, float]:
    return {
        "samples_per_sec": forecast.samples_per_sec,
        "step_sec": forecast.step_sec,
        "compute_sec": forecast.compute_sec,
        "exposed_sec": forecast.exposed_sec,
        "efficiency": forecast.efficiency,
    }


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 rank` or `2,000 ranks`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
