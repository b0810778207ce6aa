"""`kaitian-plan`: forecasts a job from what it measures under mpirun, or has measured before."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from kaitian_mpi.balance.forecast import Forecast, format_rate
from kaitian_mpi.balance.measurements import MAX_SAMPLES, Measurements, read_measurements
from kaitian_mpi.balance.planned_job import (
    MAX_RANKS,
    KindRow,
    PlannedJob,
    count,
    kind_rows,
    parse_world,
    plan_job,
    to_json,
)
from kaitian_mpi.cli.flags import FIELDS, OneLineParser, Parsed, add_flags, parse_settings
from kaitian_mpi.cli.preflight import check_file_can_be_written
from kaitian_mpi.cli.train import start_ranks, task_maker
from kaitian_mpi.config import TrainConfig, flag_name
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.files import save_json
from kaitian_mpi.runtime.abort import abort_on_error, report_once
from kaitian_mpi.runtime.launcher import read_launch
from kaitian_mpi.runtime.signals import handle_signals

PROGRAM = "kaitian-plan"
SECTIONS = {
    "what is measured (flags of kaitian-train)": "model dataset task set global_batch_size "
    "precision devices wire benchmark_seconds emulate_kinds emulate_slowdown",
}
_WIDTH = 110
_MAX_NOTES = 8
_MAX_SUBSETS = 16
_EXAMPLE_RANKS = 8


def main() -> None:
    """Run the command."""
    arguments = sys.argv[1:]
    is_first = read_launch(os.environ).world_rank == 0
    if "-h" in arguments or "--help" in arguments:
        if is_first:
            make_parser().print_help()
        return
    with abort_on_error(PROGRAM):
        with report_once():
            parsed = read_options(arguments)
        if parsed.others.file is None:
            handle_signals(PROGRAM)
            measure(parsed)
        elif is_first:
            report(read_measurements(parsed.others.file), parsed)


def measure(parsed: Parsed) -> None:
    """Measure the ranks that mpirun has started, and report on rank 0. Collective."""
    config, world, watchdog = start_ranks(TrainConfig(**parsed.settings))
    import torch.distributed as dist

    from kaitian_mpi.mpi.exchange import agree_on_errors
    from kaitian_mpi.train.measure.job import measure_job

    with agree_on_errors(world.comm):
        for flag in ("json", "save") if world.rank == 0 else ():
            if path := getattr(parsed.others, flag):
                check_file_can_be_written(f"--{flag}", str(path))
    world.relay.adopt(config)
    measured = measure_job(task_maker(config, parsed.by_set), config, world)
    with agree_on_errors(world.comm):
        if world.rank == 0:
            report(measured, parsed)
    dist.destroy_process_group()
    if watchdog is not None:
        watchdog.close()


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser: its own flags, and those of `kaitian-train`."""
    parser = OneLineParser(
        prog=PROGRAM,
        usage=f"mpirun -np N {PROGRAM} [flags]  or  {PROGRAM} FILE [flags]",
        description="Forecast the speed of a job, and which devices are worth having in it. Under "
        "mpirun, with the flags of kaitian-train, it measures the ranks and what is between them; "
        "given a file of measurements, it needs neither MPI nor the devices.",
        epilog=f"example: {PROGRAM} measured.json --world 8xcuda,16xmlu,32xcpu",
        allow_abbrev=False,
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="a file that --save has written; without it, the ranks are measured",
    )
    parser.add_argument(
        "--world",
        metavar="LIST",
        help=f"ranks of each kind, such as 8xcuda,32xcpu; at most {MAX_RANKS:,} in total (default: "
        "those measured)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the forecast to this file too"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the measurements to this file"
    )
    shown = {name for names in SECTIONS.values() for name in names.split()}
    add_flags(parser, SECTIONS, FIELDS.keys() - shown)
    return parser


def read_options(arguments: Sequence[str]) -> Parsed:
    """Parse command-line arguments.

    Raises:
        UserError: one is unknown, invalid, or of no use with the others.
    """
    parsed = parse_settings(make_parser(), arguments)
    chosen = parsed.others
    if chosen.world is not None:
        parse_world(chosen.world)
    if chosen.file is not None:
        unused = sorted(parsed.settings.keys() - {"global_batch_size"})
        if unused or chosen.save is not None:
            flag = flag_name(unused[0]) if unused else "--save"
            raise UserError(
                f"{flag} cannot be combined with {chosen.file}, which holds measurements; remove "
                "one of them"
            )
        size = parsed.settings.get("global_batch_size", 1)
        if not 1 <= size <= MAX_SAMPLES:
            raise UserError(
                f"--global-batch-size must be from 1 to {MAX_SAMPLES}, not {size}; correct or omit "
                "it"
            )
    else:
        TrainConfig(**parsed.settings)  # raises if one is invalid
    return parsed


def report(measured: Measurements, parsed: Parsed) -> None:
    """Forecast the job, write the files that are asked for, and print the result.

    Raises:
        UserError: it cannot be forecast, or a file cannot be written.
    """
    chosen = parsed.others
    world = None if chosen.world is None else parse_world(chosen.world)
    if chosen.save is not None:
        save_json(chosen.save, measured.to_json())
    size = parsed.settings.get("global_batch_size") if chosen.file is not None else None
    job = plan_job(measured, world, size)
    if chosen.json is not None:
        save_json(chosen.json, to_json(job))
    show(job, shows_allreduces=chosen.file is None)
    if chosen.save is not None:
        print(f"written to {chosen.save}; {advice(chosen.save, measured)}")


def show(job: PlannedJob, *, shows_allreduces: bool = False) -> None:
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
    emulated = " (devices or their speed emulated)" if job.measured.emulated else ""
    if shows_allreduces:
        console.print(_allreduce_table(job.measured))
    ranks = count(len(job.measured.ranks), "measured rank")
    console.print(f"forecast for {job.measured.model}, from {ranks}{emulated}")
    console.print(f"global batch: {job.global_batch_size:,} samples ({job.batch_origin})")
    console.print(_kind_table(kind_rows(whole), sum(job.world.values())))
    if 1 < len(job.subsets.forecasts) <= _MAX_SUBSETS:
        console.print(_subset_table(job))
    for line in _summary(whole):
        console.print(line)
    for line in _advice(job):
        console.print(line)


def _summary(whole: Forecast) -> list[str]:
    return [
        f"forecast: {format_rate(whole.samples_per_sec)} samples/s, "
        f"efficiency {whole.efficiency:.0%}",
        f"step: {_ms(whole.step_sec)} ms = {_ms(whole.compute_sec)} ms of computing + "
        f"{_ms(whole.exposed_sec)} ms of communication not hidden behind it",
        f"bottleneck: {whole.bottleneck}",
    ]


def advice(target: Path, measured: Measurements) -> str:
    """Return advice on using a file of measurements: a command that works, or what to measure.

    Args:
        target: the file.
        measured: its contents.
    """
    kind = measured.ranks[0].kind
    try:
        plan_job(measured, {kind: _EXAMPLE_RANKS})
    except UserError:
        return "to forecast a larger job from it, measure two ranks of each kind"
    return f"try {PROGRAM} {target} --world {_EXAMPLE_RANKS}x{kind}"


def _table(title: str, columns: Sequence[str], texts: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.ASCII2)
    for column in columns:
        table.add_column(column, justify="left" if column in texts else "right")
    return table


def _kind_table(rows: Sequence[KindRow], ranks: int) -> Table:
    table = _table(
        f"world: {count(ranks, 'rank')}, {count(len(rows), 'kind')}",
        ("kind", "ranks", "samples/step per rank", "ms computing", "without samples"),
        ("kind",),
    )
    for row in rows:
        table.add_row(
            row.kind,
            f"{row.ranks:,}",
            f"{row.least:,}" + (f" to {row.most:,}" if row.most > row.least else ""),
            _ms(row.compute_sec),
            f"{row.idle:,} of {row.ranks:,}" if row.idle else "none",
        )
    return table


def _subset_table(job: PlannedJob) -> Table:
    table = _table(
        "with these kinds alone",
        ("kinds", "samples/s", "step ms", "efficiency", "bottleneck"),
        ("kinds", "bottleneck"),
    )
    for kinds, cast in job.subsets.forecasts.items():
        rate, step = format_rate(cast.samples_per_sec), _ms(cast.step_sec)
        table.add_row(" + ".join(kinds), rate, step, f"{cast.efficiency:.0%}", cast.bottleneck)
    return table


def _allreduce_table(measured: Measurements) -> Table:
    table = _table(
        "allreduce of all gradients" + (" (emulated)" if measured.emulated else ""),
        ("kinds", "ranks", "latency us", "GB/s", "gradients ms"),
        ("kinds",),
    )
    for entry in measured.allreduces:
        cost = entry.cost
        table.add_row(
            " + ".join(entry.ranks_per_kind),
            str(sum(entry.ranks_per_kind.values())),
            f"{1e6 * cost.latency_sec:.0f}" if cost.latency_sec >= 1e-6 else "<1",
            f"{1e-9 / cost.sec_per_byte:.2f}" if cost.sec_per_byte else "-",
            f"{1e3 * cost.seconds(measured.gradient_bytes):.1f}",
        )
    return table


def _advice(job: PlannedJob) -> list[str]:
    """Return lines on each kind's worth, the best choice of kinds, and the guesses."""
    subsets = job.subsets
    best = subsets.forecasts[subsets.best]
    lines = [f"{kind}: {subsets.worth(kind)}" for kind in subsets.kinds]
    lines.append(f"best: {' + '.join(subsets.best)}, {format_rate(best.samples_per_sec)} samples/s")
    lines += [f"note: {note}" for note in subsets.notes[:_MAX_NOTES]]
    if len(subsets.notes) > _MAX_NOTES:
        lines.append(f"note: {len(subsets.notes) - _MAX_NOTES} more guesses are in the JSON")
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


if __name__ == "__main__":
    main()
