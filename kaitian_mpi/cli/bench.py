"""`kaitian-bench`: measures under mpirun what each device adds to a job."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from kaitian_mpi.cli.flags import OneLineParser, add_flags, config_of
from kaitian_mpi.cli.logs import configure_logging
from kaitian_mpi.cli.preflight import (
    check_before_loading,
    check_file_can_be_written,
    devices_of_host,
    with_emulation,
)
from kaitian_mpi.devices.plugin import import_for_optimizers, import_torch
from kaitian_mpi.distributed.network.interfaces import initialize_mpi_on
from kaitian_mpi.mpi.exchange import agree_on_errors
from kaitian_mpi.runtime.abort import abort_on_error, rank_prefix, report_once
from kaitian_mpi.runtime.launcher import read_launch
from kaitian_mpi.runtime.signals import handle_signals
from kaitian_mpi.runtime.watchdog import setup_limit, start_watchdog

PROGRAM = "kaitian-bench"
FLAGS = (
    *("model", "dataset", "data_dir", "val_split", "augment", "global_batch_size"),
    *("benchmark_seconds", "benchmark_cache", "micro_batch_size", "allreduce", "network_allreduce"),
    *("devices", "device_map", "wire", "relay_dtype", "relay_memory_mb", "share_device"),
    *("group_by", "network_interface", "emulate_kinds", "emulate_slowdown", "precision"),
    *("memory_format", "seed", "log_level"),
)

_SECONDS = 20.0  # more than before training, since nothing else follows


def main() -> None:
    """Run the command."""
    arguments = sys.argv[1:]
    if "-h" in arguments or "--help" in arguments:
        if read_launch(os.environ).world_rank == 0:
            make_parser().print_help()
        return
    handle_signals(PROGRAM)
    with abort_on_error(PROGRAM):
        with report_once():
            chosen = make_parser().parse_args(arguments)
        target = Path(chosen.json).expanduser() if chosen.json else None
        config = config_of(chosen, FLAGS)
        configure_logging(config.log_level, rank_prefix(), read_launch(os.environ).world_rank)
        watchdog = start_watchdog(setup_limit(0))
        comm = initialize_mpi_on(config.network_interface)
        config = with_emulation(config, comm)
        devices = devices_of_host(config.devices, config.device_map, comm)
        check_before_loading(config, comm)
        with agree_on_errors(comm):
            if comm.rank == 0 and target is not None:
                check_file_can_be_written("--json", str(target))
        import_torch()  # late: it takes seconds
        import torch.distributed as dist

        from kaitian_mpi.distributed.startup import init
        from kaitian_mpi.recipes.image_classification import make_task
        from kaitian_mpi.train.measure.report import bench

        import_for_optimizers()
        emulated = config.emulate_kinds, config.emulate_slowdown
        world = init(devices, *emulated, config.share_device, config.group_by)
        world.relay.adopt(config)
        bench(partial(make_task, config), config, world, target)
        dist.destroy_process_group()
        if watchdog is not None:
            watchdog.close()


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser: the flags of `kaitian-train` that a benchmark needs."""
    parser = OneLineParser(
        prog=PROGRAM,
        description="Time a model on every rank, and communication between them, and forecast "
        "what each device kind adds to the job.",
        epilog=f"example: mpirun -np 4 {PROGRAM} --model mobilenetv2 --json bench.json",
        allow_abbrev=False,
    )
    add_flags(parser, FLAGS, benchmark_seconds=_SECONDS)
    parser.add_argument(
        "--json", default="", metavar="FILE", help="write the result to this file, for kaitian-plan"
    )
    return parser


if __name__ == "__main__":
    main()
