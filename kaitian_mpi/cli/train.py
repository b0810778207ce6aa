"""`kaitian-train`: train a model or a task on every device that mpirun started a process for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from kaitian_mpi.cli.flags import make_parser, parse_settings
from kaitian_mpi.cli.logs import configure_logging
from kaitian_mpi.cli.preflight import (
    check_before_loading,
    hide_unused_devices,
    start_mpi,
    with_emulation,
)
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices.plugin import import_for_optimizers, import_torch, without_collection
from kaitian_mpi.runtime import startup_clock
from kaitian_mpi.runtime.abort import abort_on_error, rank_prefix, report_once
from kaitian_mpi.runtime.launcher import Launch, prepare_environment, read_launch
from kaitian_mpi.runtime.lifecycle import exit_after_loss
from kaitian_mpi.runtime.signals import handle_signals
from kaitian_mpi.runtime.system import usable_cores
from kaitian_mpi.runtime.watchdog import Watchdog, setup_limit, start_watchdog

if TYPE_CHECKING:
    from kaitian_mpi.mpi.world import World
    from kaitian_mpi.train.task import Task

PROGRAM = "kaitian-train"


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
        config, _, watchdog = start_ranks(config)
        import torch.distributed as dist

        from kaitian_mpi.train.training import Training

        with Training(task_maker(config, parsed.by_set), config) as training:
            for _ in training:
                pass
        if dist.is_initialized():  # a standby rank has no group
            dist.destroy_process_group()
        if watchdog is not None:
            watchdog.close()
        exit_after_loss()


def start_ranks(config: TrainConfig) -> tuple[TrainConfig, World, Watchdog | None]:
    """Start MPI, import torch, and choose this rank's device. Collective."""
    launch = read_launch(os.environ)
    level = "warning" if config.quiet and config.log_level == "info" else config.log_level
    configure_logging(level, rank_prefix(), launch.world_rank)
    watchdog = start_watchdog(setup_limit(config.step_timeout))
    if launch.local_size < launch.world_size:
        hide_unused_devices(os.environ, config.devices)
        load_torch(launch)  # while the other hosts' ranks are started
    startup_clock.begin("MPI")
    comm, devices = start_mpi(config)
    config = with_emulation(config, comm)
    check_before_loading(config, comm)
    load_torch(launch)  # late: it takes seconds

    from kaitian_mpi.distributed.startup import init

    startup_clock.begin("devices")
    emulated = config.emulate_kinds, config.emulate_slowdown
    world = init(devices, *emulated, config.share_device, config.group_by)
    startup_clock.begin("imports")
    import_for_optimizers()
    return config, world, watchdog


def load_torch(launch: Launch) -> None:
    """Import torch and this package's modules that use it; nothing if that is done already."""
    startup_clock.begin("imports")
    prepare_environment(os.environ, launch, len(usable_cores()))  # torch reads some of it
    import_torch()
    with without_collection():
        import_module("kaitian_mpi.train.training")


def task_maker(config: TrainConfig, by_set: frozenset[str]) -> Callable[[], Task]:
    """Return what makes the task: the user's function, or the recipe for --model."""
    if config.task:
        from kaitian_mpi.recipes import user_task

        return partial(user_task.build_task, config.task, config.set, config.seed, by_set)
    from kaitian_mpi.recipes import image_classification

    return partial(image_classification.make_task, config)


if __name__ == "__main__":
    main()
