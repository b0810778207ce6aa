"""Checks that need neither torch nor a device, so that common mistakes are answered at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kaitian_mpi.balance.planner import plan_equal
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices.emulation import parse_kinds, parse_slowdown
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi import fault_tolerance
from kaitian_mpi.mpi.agreement import faults_agreed

if TYPE_CHECKING:
    from mpi4py import MPI


def check_before_loading(config: TrainConfig, comm: MPI.Intracomm) -> None:
    """Check what the number of ranks and the hosts' files tell about a config. Collective.

    Raises:
        AgreedError: a value does not suit the number of ranks, or a folder is missing on a host.
    """
    with faults_agreed(comm):
        parse_kinds(config.emulate_kinds, comm.size)
        parse_slowdown(config.emulate_slowdown, comm.size)
        if config.spares:
            _check_spares(config.spares, comm.size)
        if config.batch_policy == "global":
            plan_equal(comm.size - config.spares, config.global_batch_size)
        if config.data_dir and not Path(config.data_dir).is_dir():
            raise UserError(
                f"--data-dir: found no folder {config.data_dir}, needed the one that holds the "
                f"files of --dataset {config.dataset}; name it as this host has it"
            )


def _check_spares(spares: int, ranks: int) -> None:
    if spares >= ranks:
        raise UserError(
            f"--spares: found {spares} of {ranks} ranks, needed fewer, so that one is left to train"
        )
    if not fault_tolerance.is_on():
        raise UserError(
            "--spares: found fault tolerance off, so that no rank can be replaced; start the job "
            "with mpirun --with-ft ulfm"
        )
