"""`kaitian-plan`: forecasts a job from what it measures under mpirun, or has measured before."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kaitian_mpi.balance.communication import guessed_kinds
from kaitian_mpi.balance.forecast import SubsetForecasts
from kaitian_mpi.balance.layouts import prediction_table
from kaitian_mpi.balance.measurements import (
    Measurements,
    plan_job,
    predict_world,
    read_measurements,
)
from kaitian_mpi.cli.flags import (
    FIELDS,
    MAX_RANKS,
    OneLineParser,
    Parsed,
    add_flags,
    add_launch_flags,
    launch_flags_in,
    parse_settings,
    start_mpirun_if_requested,
)
from kaitian_mpi.cli.plan_memory import estimate
from kaitian_mpi.cli.train import start_ranks, task_maker
from kaitian_mpi.config import TrainConfig, flag_name
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.files import json_bytes, write_output
from kaitian_mpi.runtime.abort import abort_on_error, report_end, report_once
from kaitian_mpi.runtime.launcher import read_launch
from kaitian_mpi.runtime.signals import handle_signals
from kaitian_mpi.runtime.watchdog import stop_watchdog

PROGRAM = "kaitian-plan"
SECTIONS = {
    "measurement (flags of kaitian-train)": "model dataset task set global_batch_size "
    "precision devices wire benchmark_seconds emulate_kinds emulate_slowdown"
}

_MAX_SUBSETS = 16
_MIN_GAIN = 0.005  # shown as +1%


def main() -> None:
    """Run the command."""
    arguments = sys.argv[1:]
    is_first = read_launch(os.environ).world_rank == 0
    if make_parser().shows_help(arguments):
        return
    with abort_on_error(PROGRAM):
        with report_once():
            parsed = read_options(arguments)
            if parsed.others.memory is None:
                start_mpirun_if_requested(PROGRAM, arguments, (), parsed.others)
        if parsed.others.memory is not None:
            estimate(parsed, show_table)
        elif parsed.others.file is None:
            handle_signals(PROGRAM)
            measure(parsed)
        elif is_first:
            report(read_measurements(parsed.others.file), parsed)


def measure(parsed: Parsed) -> None:
    """Measure the ranks that mpirun has started, and report on rank 0. Collective."""
    config, world = start_ranks(TrainConfig(**parsed.settings))
    import torch.distributed as dist

    from kaitian_mpi.mpi.exchange import agree_on_errors
    from kaitian_mpi.train.measure.job import measure_job
    from kaitian_mpi.train.task import as_task

    with agree_on_errors(world.comm):
        if world.rank == 0 and parsed.others.save is not None:
            check_can_be_written(parsed.others.save)
    world.communication.adopt(config)
    measured = measure_job(partial(as_task, task_maker(config, parsed.by_set)), config, world)
    with agree_on_errors(world.comm):
        if world.rank == 0:
            report(measured, parsed)
    dist.destroy_process_group()
    stop_watchdog()
    report_end()


def make_parser() -> OneLineParser:
    """Return the command's parser: its own flags, and those of `kaitian-train`."""
    parser = OneLineParser(
        PROGRAM,
        "Forecast the speed of a job, and which devices are worth having in it. With -n or under "
        "mpirun, with the flags of kaitian-train, it measures the ranks and the links between "
        "them; given a file of measurements, it needs neither MPI nor the devices.",
        f"{PROGRAM} measured.json --world 8xcuda,16xmlu,32xcpu",
        f"{PROGRAM} -n N [flags]  or  {PROGRAM} FILE [flags]",
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="a file that --save has written; without it, the ranks are measured",
    )
    parser.add(
        "--world",
        f"ranks of each kind, such as 8xcuda,32xcpu; at most {MAX_RANKS:,} in total "
        "(default: those measured)",
        "LIST",
        None,
    )
    parser.add(
        "--memory",
        "estimate what each rank's memory is for in each layout, without starting one: the ranks' "
        "kinds, and the memory of each, such as 2xcuda:80GB,4xcpu:16GB; a size that is left out is "
        "that of this machine's devices, and -n or --hostfile may give the number of ranks",
        "LIST",
        None,
    )
    parser.add("--save", "write the measurements to this file", "FILE", None)
    add_launch_flags(parser)
    shown = {name for names in SECTIONS.values() for name in names.split()}
    add_flags(parser, SECTIONS, FIELDS.keys() - shown)
    return parser


def read_options(arguments: Sequence[str]) -> Parsed:
    """Parse command-line arguments."""
    parsed = parse_settings(make_parser(), arguments)
    chosen = parsed.others
    if chosen.world is not None:
        chosen.world = parse_world(chosen.world)
    TrainConfig(**parsed.settings)  # raises if one is invalid
    if chosen.file is None:
        return parsed
    unused = [flag_name(name) for name in sorted(parsed.settings.keys() - {"global_batch_size"})]
    unused += [f"--{name}" for name in ("save", "memory") if getattr(chosen, name) is not None]
    unused += launch_flags_in(arguments)
    if unused:
        flag = unused[0]
        raise UserError(
            f"{flag} cannot be combined with {chosen.file}, which holds measurements; remove one "
            "of them"
        )
    return parsed


def check_can_be_written(path: str) -> None:
    """Check that a file can be written, before the work whose result it will contain."""
    is_new = not os.path.lexists(path)
    try:
        open(path, "ab").close()
        if is_new:
            os.unlink(path)
    except OSError as error:
        raise UserError(
            f"--save {path}: {error.strerror}; name a file that can be written"
        ) from error


def parse_world(text: str) -> dict[str, int]:
    """Parse `8xcuda,32xcpu` into the number of ranks of each kind."""
    parts = re.findall(r"(?:^|,)0*([1-9][0-9]{0,8})x([^\s,]+)(?=,|$)", text)
    world = {kind: int(ranks) for ranks, kind in parts}
    if len(world) != text.count(",") + 1 or sum(world.values()) > MAX_RANKS:
        raise UserError(
            f"--world {text}: write it like 8xcuda,32xcpu, with each kind once and at most "
            f"{MAX_RANKS:,} ranks in all"
        )
    return world


def report(measured: Measurements, parsed: Parsed) -> None:
    """Forecast the job and print the result; write the measurements if that is asked for."""
    chosen = parsed.others
    if chosen.save is not None:
        content = json_bytes(measured.to_json(), allow_nan=False)
        write_output(Path(chosen.save), content, "name a file in a folder that can be written")
    size = parsed.settings.get("global_batch_size") if chosen.file is not None else None
    job = plan_job(measured, chosen.world, size)
    show(measured, job)
    if chosen.save is not None:
        world = f"8x{measured.ranks[0].kind}"
        print(f"written to {chosen.save}; try {PROGRAM} {chosen.save} --world {world}")


def show(measured: Measurements, job: SubsetForecasts) -> None:
    """Print the forecast."""
    whole = job.whole
    emulated = " (devices or their speed emulated)" if measured.emulated else ""
    print(f"forecast for {measured.model}, from {len(measured.ranks):,} measured ranks{emulated}")
    print(f"global batch: {job.global_batch_size:,} samples")
    print(f"world: {sum(job.world.values()):,} ranks")
    heads = "kind", "ranks", "samples/step per rank", "ms computing", "without samples"
    show_table(heads, [_kind_row(job, kind) for kind in job.world])
    if 1 < len(job.forecasts) <= _MAX_SUBSETS:
        print("with these kinds alone")
        rows = []
        for kinds, cast in job.forecasts.items():
            figures = _rate(cast.samples_per_sec), _ms(cast.step_sec), f"{cast.efficiency:.0%}"
            rows.append((" + ".join(kinds), *figures))
        show_table(("kinds", "samples/s", "step ms", "efficiency"), rows)
    rate = whole.samples_per_sec
    print(f"forecast: {_rate(rate)} samples/s, efficiency {whole.efficiency:.0%}")
    print(
        f"step: {_ms(whole.step_sec)} ms = {_ms(whole.compute_sec)} ms of computing + "
        f"{_ms(whole.exposed_sec)} ms of communication not hidden behind it"
    )
    for kind in job.world:
        gain = job.gain(kind)
        if gain is not None:
            verdict = "worth it" if gain >= _MIN_GAIN else "not worth it"
            print(
                f"{kind}: with {kind} {_rate(rate)} samples/s, without {_rate(rate / (1 + gain))}: "
                f"{verdict} ({gain:+.0%})"
            )
    best = job.forecasts[job.best].samples_per_sec
    print(f"best: {' + '.join(job.best)}, {_rate(best)} samples/s")
    if predictions := predict_world(measured, job):
        print("layouts (--layout) of the whole world")
        table = prediction_table(predictions)
        show_table(table[0], table[1:])
    for kind in guessed_kinds(measured.allreduces, job.world):
        print(f"note: only one rank of {kind} was measured: its allreduce is assumed to be slow")
    measured_kinds = [entry.ranks_per_kind.keys() for entry in measured.allreduces]
    if any(len(kinds) > 1 and {*kinds} not in measured_kinds for kinds in job.forecasts):
        print("note: some of these kinds were measured only among more: that allreduce is assumed")


def show_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below heads."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        print("  ".join(["", *map(str.rjust, row, widths)]))


def _kind_row(job: SubsetForecasts, kind: str) -> tuple[str, ...]:
    shares = [share for share in job.whole.shares if share.cohort.kind == kind]
    least, most = (pick(share.samples for share in shares) for pick in (min, max))
    samples = f"{least:,}" + (f" to {most:,}" if most > least else "")
    idle = sum(share.ranks for share in shares if share.samples == 0)
    slowest = _ms(max(share.seconds for share in shares))
    return kind, f"{job.world[kind]:,}", samples, slowest, f"{idle:,}"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


if __name__ == "__main__":
    main()
