"""Gathers the facts that cost nothing: neither a device nor a disk is used. Takes milliseconds."""

from __future__ import annotations

import os
import platform
import resource
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from kaitian_mpi.preflight.facts import PACKAGES, SHM, Machine, Mpi, RankFacts, Software
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.command import hosts_of_launcher
from kaitian_mpi.runtime.launcher import Launch, is_from_srun, read_launch
from kaitian_mpi.runtime.mpi_libraries import loaded_library
from kaitian_mpi.runtime.system import usable_cores
from kaitian_mpi.runtime.tags import PROTOCOL

if TYPE_CHECKING:
    from mpi4py import MPI

_THREADS = ("single", "funneled", "serialized", "multiple")


def collect(host: str, rank: int) -> RankFacts:
    """Return what is known of this process without MPI, torch and devices."""
    launch = read_launch(os.environ)
    return RankFacts(
        rank=rank,
        host=host,
        local_rank=launch.local_rank,
        local_size=launch.local_size,
        software=Software(
            python=platform.python_version(),
            packages={name: _version(name) for name in PACKAGES},
            protocol=PROTOCOL,
        ),
        machine=_machine(),
        given_hosts=_given_hosts(launch),
    )


def collect_mpi(comm: MPI.Comm) -> Mpi:
    """Return what is known of MPI, which must be initialized. Not collective."""
    from mpi4py import MPI

    return Mpi(
        library=loaded_library(),
        threads=_THREADS[MPI.Query_thread()],
        size=comm.size,
        launched=read_launch(os.environ).world_size,
        by_srun=is_from_srun(os.environ),
        survives_requested=ulfm.is_enabled(),
        survives=_has_fault_tolerance(),
    )


def _has_fault_tolerance() -> bool:
    from mpi4py import MPI

    try:
        MPI.COMM_SELF.Is_revoked()
    except (NotImplementedError, MPI.Exception):
        return False
    return True


def _given_hosts(launch: Launch) -> dict[str, int | None]:
    if launch.world_rank or launch.local_size < launch.world_size:
        return {}
    return {host.name: host.slots for host in hosts_of_launcher(os.getppid())}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _machine() -> Machine:
    try:
        shm = os.statvfs(SHM)
    except OSError:
        shm = None
    return Machine(
        cores=len(usable_cores()),
        shm_bytes=None if shm is None else shm.f_blocks * shm.f_frsize,
        shm_free_bytes=None if shm is None else shm.f_bavail * shm.f_frsize,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )
