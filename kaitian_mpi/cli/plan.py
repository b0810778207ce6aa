"""`kaitian-plan`: forecasts a larger job from the measurements of `kaitian-bench`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kaitian_mpi.balance.bench_file import MAX_SAMPLES, Bench, read_bench
from kaitian_mpi.balance.communication import ddp_buckets
from kaitian_mpi.balance.forecast import (
    Forecast,
    SubsetForecasts,
    forecast_subsets,
    format_rate,
    scale_cohorts,
)
from kaitian_mpi.cli.flags import OneLineParser
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.files import save_json

PROGRAM = "kaitian-plan"
MAX_RANKS = 100_000
_WIDTH = 110
_MAX_NOTES = 8


def main() -> None:
    """Run the command."""
    try:
        options = make_parser().parse_args()
        job = plan_job(options.bench, options.world, options.global_batch_size)
        if options.json is not None:
            save_json(options.json, to_json(job))
    except UserError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        sys.exit(2)
    show(job)


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = OneLineParser(
        prog=PROGRAM,
        description="Forecast the speed of a larger job, and which devices are worth having in "
        "it, from the measurements of kaitian-bench --json. Needs neither MPI nor the devices.",
        epilog=f"example: {PROGRAM} bench.json --world 8xcuda,16xmlu,32xcpu",
        allow_abbrev=False,
    )
    parser.add_argument("bench", type=Path, help="the file that kaitian-bench --json wrote")
    parser.add_argument(
        "--world",
        required=True,
        metavar="LIST",
        help=f"ranks of each kind, such as 8xcuda,32xcpu; at most {MAX_RANKS:,} in total",
    )
    parser.add_argument(
        "--global-batch-size",
        type=int,
        metavar="N",
        help="samples per step over all ranks (default: the file's, scaled with the ranks)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the forecast to this file too"
    )
    return parser


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that is forecast."""

    bench: Bench
    world: dict[str, int]
    """Ranks of each kind."""
    global_batch_size: int
    batch_origin: str
    """How the global batch size was chosen, for the output."""
    subsets: SubsetForecasts


def plan_job(path: Path, world_text: str, global_batch_size: int | None) -> Job:
    """Forecast a job.

    Args:
        path: the benchmark's file.
        world_text: as for `parse_world`.
        global_batch_size: samples per step; None for the benchmark's, scaled with the ranks.

    Raises:
        UserError: an argument or the file is invalid.
    """
    world = parse_world(world_text)
    if global_batch_size is not None and not 1 <= global_batch_size <= MAX_SAMPLES:
        raise UserError(
            f"--global-batch-size: found {global_batch_size}, needed 1 to {MAX_SAMPLES}; "
            "correct it or omit it"
        )
    bench = read_bench(path)
    cohorts = scale_cohorts(bench.cohorts(), world)
    origin = "as given"
    if global_batch_size is None:
        measured = bench.global_batch_size
        scaled = round(measured * sum(world.values()) / len(bench.ranks))
        global_batch_size = min(max(1, scaled), MAX_SAMPLES)
        origin = f"the benchmark's {measured:,} for {_count(len(bench.ranks), 'rank')}, scaled"
    subsets = forecast_subsets(
        cohorts, global_batch_size, ddp_buckets(bench.gradient_bytes), bench.measured
    )
    return Job(
        bench=bench,
        world=world,
        global_batch_size=global_batch_size,
        batch_origin=origin,
        subsets=subsets,
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
                f"--world: found {part.strip()!r}, needed a number of ranks of 1 or more, an x and "
                "a kind; write it like 8xcuda,32xcpu"
            )
        kind = match[2]
        if kind in world:
            raise UserError(f"--world: found {kind} twice, needed each kind once; add them up")
        world[kind] = int(match[1])
    if sum(world.values()) > MAX_RANKS:
        raise UserError(
            f"--world: found {sum(world.values()):,} ranks, needed {MAX_RANKS:,} at most; ask for "
            "fewer"
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


def show(job: Job) -> None:
    """Print the forecast."""
    whole = job.subsets.whole
    # Plain text: names from the file must not be parsed as markup, and log files have no colors.
    console = Console(
        width=_WIDTH,
        force_terminal=False,
        no_color=True,
        markup=False,
        emoji=False,
        highlight=False,
    )
    ranks = sum(job.world.values())
    emulated = " (devices or their speed emulated)" if job.bench.emulated else ""
    console.print(
        f"forecast for {job.bench.model}, from {_count(len(job.bench.ranks), 'measured rank')}"
        f"{emulated}"
    )
    console.print(f"global batch: {job.global_batch_size:,} samples ({job.batch_origin})")
    console.print(_kind_table(kind_rows(whole), ranks))
    console.print(
        f"forecast: {format_rate(whole.samples_per_sec)} samples/s, "
        f"efficiency {whole.efficiency:.0%}"
    )
    console.print(
        f"step: {_ms(whole.step_sec)} ms = {_ms(whole.compute_sec)} ms of computing + "
        f"{_ms(whole.exposed_sec)} ms of communication not hidden behind it"
    )
    console.print(f"bottleneck: {whole.bottleneck}")
    for line in _advice(job.subsets):
        console.print(line)


def to_json(job: Job) -> dict[str, Any]:
    """Return the forecast as the content of the --json file."""
    subsets = job.subsets
    return {
        "version": 1,
        "model": job.bench.model,
        "emulated": job.bench.emulated,
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


def _kind_table(rows: Sequence[KindRow], ranks: int) -> Table:
    title = f"world: {_count(ranks, 'rank')}, {_count(len(rows), 'kind')}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.ASCII2)
    for column in ("kind", "ranks", "samples/step per rank", "ms computing", "without samples"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for row in rows:
        table.add_row(
            row.kind,
            f"{row.ranks:,}",
            f"{row.least:,}" + (f" to {row.most:,}" if row.most > row.least else ""),
            _ms(row.compute_sec),
            f"{row.idle:,} of {row.ranks:,}" if row.idle else "none",
        )
    return table


def _advice(subsets: SubsetForecasts) -> list[str]:
    """Return lines on each kind's worth, the best choice of kinds, and the guesses."""
    best = subsets.forecasts[subsets.best]
    lines = [f"{kind}: {subsets.worth(kind)}" for kind in subsets.kinds]
    lines.append(f"best: {' + '.join(subsets.best)}, {format_rate(best.samples_per_sec)} samples/s")
    lines += [f"note: {note}" for note in subsets.notes[:_MAX_NOTES]]
    if len(subsets.notes) > _MAX_NOTES:
        lines.append(f"note: {len(subsets.notes) - _MAX_NOTES} more guesses are in the JSON")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


if __name__ == "__main__":
    main()
