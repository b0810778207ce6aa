"""Checks before torch is loaded, so that common mistakes are reported immediately."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kaitian_mpi.balance.shares import plan_equal
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices.choice import hide_accelerators, visibility_variables
from kaitian_mpi.devices.emulation import given_emulation, read_emulation
from kaitian_mpi.distributed.interfaces import initialize_mpi_on
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import SAME_SETTINGS, agree_on_errors, check_same, gather_values
from kaitian_mpi.preflight.facts import JobFacts, collect
from kaitian_mpi.preflight.job_checks import judge_placement
from kaitian_mpi.preflight.verdict import Level
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.launcher import read_launch
from kaitian_mpi.runtime.mpi_libraries import loaded_library, survival_advice

if TYPE_CHECKING:
    from mpi4py import MPI


def with_emulation(config: TrainConfig, comm: MPI.Intracomm) -> TrainConfig:
    """Return a config with the emulation of its own flags or of the variables. Collective."""
    given = given_emulation(config.emulate_kinds, config.emulate_slowdown)
    emulation = read_emulation(gather_values(comm, given))
    return replace(config, emulate_kinds=emulation.kinds, emulate_slowdown=emulation.slowdown)


def hide_unused_devices(environ: Any, devices: str) -> None:
    """Hide accelerators from the user's code in a rank that is to use the CPU.

    Before MPI is started, if possible, since it may start the vendors' drivers.
    """
    launch = read_launch(environ)
    ranks = launch.local_rank, launch.local_size
    environ.update(hide_accelerators(devices, *ranks, visibility_variables()))


def start_mpi(chosen: Any) -> tuple[MPI.Intracomm, str]:
    """Start MPI as the flags say. Collective.

    Returns:
        `COMM_WORLD`, and the devices of this host's ranks, as `--devices` takes them.
    """
    hide_unused_devices(os.environ, chosen.devices)
    comm = initialize_mpi_on(chosen.network_interface)
    devices = chosen.devices
    if any(gather_values(comm, chosen.device_map)):
        devices = _devices_in_map(chosen.device_map, devices, comm)
    hide_unused_devices(os.environ, devices)
    return comm, devices


def _devices_in_map(path: str, devices: str, comm: MPI.Intracomm) -> str:
    """Return this host's devices in the device map that rank 0 reads. Collective."""
    from kaitian_mpi.supervise.environments import devices_for, read_device_map
    from kaitian_mpi.supervise.probe import is_local

    known: dict[str, str] = {}
    with agree_on_errors(comm):
        if devices != "auto":
            raise UserError("--devices cannot be combined with --device-map; remove one of them")
        if comm.rank == 0:
            known = read_device_map(path)
    path, known = gather_values(comm, (path, known))[0]
    with agree_on_errors(comm):
        devices = devices_for(known, socket.gethostname(), is_local, path)
    return devices


def check_before_loading(config: TrainConfig, comm: MPI.Intracomm) -> None:
    """Check a config against the other ranks', their number, and each host's files. Collective."""
    check_same(comm, config.shared_values(), SAME_SETTINGS)
    spares, ranks = config.spares, comm.size
    with agree_on_errors(comm):
        facts = (collect(socket.gethostname(), 0),) if comm.rank == 0 else ()
        for verdict in judge_placement(JobFacts(ranks=facts)):
            if verdict.level is Level.PROBLEM:
                raise UserError(str(verdict))
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
