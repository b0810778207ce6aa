"""`kaitian-train`: trains a model or a task on every device that mpirun started a process for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kaitian_mpi.balance.shares import plan_equal
from kaitian_mpi.cli.flags import make_parser, parse_settings, start_mpirun_if_requested
from kaitian_mpi.cli.logs import configure_logging
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices.choice import hide_accelerators
from kaitian_mpi.devices.emulation import given_emulation, read_emulation
from kaitian_mpi.devices.plugin import import_for_optimizers, load_torch
from kaitian_mpi.distributed.interfaces import initialize_mpi_on
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import SAME_SETTINGS, agree_on_errors, check_same, gather_values
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.abort import abort_on_error, rank_prefix, report_end, report_once
from kaitian_mpi.runtime.launcher import read_launch
from kaitian_mpi.runtime.lifecycle import exit_after_loss
from kaitian_mpi.runtime.mpi_libraries import loaded_library, survival_advice
from kaitian_mpi.runtime.signals import handle_signals
from kaitian_mpi.runtime.watchdog import first_step_limit, setup_limit, start_watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.mpi.world import World
    from kaitian_mpi.train.task import JointTask, Task

PROGRAM = "kaitian-train"
_TRAINING = ["kaitian_mpi.train.training"]


def main() -> None:
    """Run the command."""
    arguments = sys.argv[1:]
    parser = make_parser(PROGRAM)
    if parser.shows_help(arguments):
        return
    handle_signals(PROGRAM)
    with abort_on_error(PROGRAM):
        with report_once():
            parsed = parse_settings(parser, arguments)
            config = TrainConfig(**parsed.settings)
            start_mpirun_if_requested(PROGRAM, arguments, (), parsed.others)
        config, _ = start_ranks(config)
        import torch.distributed as dist

        from kaitian_mpi.train.training import Training

        with Training(task_maker(config, parsed.by_set), config) as training:
            training.run()
        if dist.is_initialized():  # a standby rank has no group
            dist.destroy_process_group()
        report_end()
        exit_after_loss()


def start_ranks(config: TrainConfig) -> tuple[TrainConfig, World]:
    """Start MPI, import torch, and choose this rank's device. Collective."""
    launch = read_launch(os.environ)
    level = "warning" if config.quiet and config.log_level == "info" else config.log_level
    configure_logging(level, rank_prefix(), launch.world_rank)
    start_watchdog(setup_limit(config.step_timeout), first_step_limit(config.step_timeout))
    hide_unused_devices(os.environ, config.devices)
    if launch.local_size < launch.world_size:
        load_torch(launch, _TRAINING)  # while the other hosts' ranks are started
    comm = initialize_mpi_on(config.network_interface)
    settings = given_emulation(config.emulate_kinds, config.emulate_slowdown)
    emulation = read_emulation(gather_values(comm, settings))
    kinds = emulation.kinds
    slowdown = emulation.slowdown
    config = replace(config, emulate_kinds=kinds, emulate_slowdown=slowdown)
    check_before_loading(config, comm)
    load_torch(launch, _TRAINING)  # late: it takes seconds, unless that is done already

    from kaitian_mpi.distributed.startup import init

    how = config.share_device, config.group_by, config.vendor_library
    world = init(config.devices, kinds, slowdown, *how)
    import_for_optimizers()
    return replace(config, vendor_library=world.communication.vendor_library), world


def hide_unused_devices(environ: Any, devices: str) -> None:
    """Hide accelerators from a rank that is to use the CPU; MPI may start the vendors' drivers."""
    launch = read_launch(environ)
    environ.update(hide_accelerators(devices, launch.local_rank, launch.local_size))


def check_before_loading(config: TrainConfig, comm: MPI.Intracomm) -> None:
    """Check a config against the other ranks', their number, and each host's files. Collective."""
    check_same(comm, config.shared_values(), SAME_SETTINGS)
    spares = config.spares
    ranks = comm.size
    with agree_on_errors(comm):
        if spares >= ranks:
            raise UserError(
                f"--spares {spares} leaves none of the {ranks} ranks to train; give fewer"
            )
        if spares and not ulfm.is_enabled():
            raise UserError(
                "--spares: fault tolerance is off, so no rank can be replaced; "
                + survival_advice(loaded_library())
            )
        if config.batch_policy == "global":
            plan_equal(ranks - spares, config.global_batch_size)
        if config.data_dir:
            try:
                os.scandir(config.data_dir).close()
            except OSError as error:
                raise UserError(
                    f"--data-dir {config.data_dir}: {error.strerror}; name the folder that holds "
                    f"the files of --dataset {config.dataset} on this host"
                ) from error


def task_maker(config: TrainConfig, by_set: frozenset[str]) -> Callable[[], Task] | JointTask:
    """Return the function that makes the task: the user's, or the recipe for --model."""
    if config.task:
        from kaitian_mpi.recipes import user_task

        return partial(user_task.build_task, config.task, config.set, config.seed, by_set)
    from kaitian_mpi.recipes import image_classification
    from kaitian_mpi.train.task import JointTask

    return JointTask(partial(image_classification.make_task, config))


if __name__ == "__main__":
    main()
