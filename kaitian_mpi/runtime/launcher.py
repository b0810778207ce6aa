"""Reads rank and size from the launcher's environment, and sets MPI's, before MPI starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

# (world rank, world size, local rank, local size), in the order they are tried.
# Not Slurm's: inside an allocation mpirun's ranks see the SLURM_* variables of their daemon.
_LAUNCHERS = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

# Set in srun's steps, where MPI may or may not find the other ranks.
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")

FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
"""The variable that `mpirun --with-ft ulfm` sets."""

EAGER_BYTES = 264 << 10
"""The longest message over TCP, with MPI's header, that is sent without asking the receiver."""
_MESSAGE_LIMITS = "OMPI_MCA_btl_tcp_eager_limit", "OMPI_MCA_btl_tcp_max_send_size"

SUPERVISED = "OMPI_KAITIAN_JOB"
"""Set by `kaitian-supervise`; Open MPI forwards OMPI_* variables to the ranks on all hosts."""


@dataclass(frozen=True)
class Launch:
    """This process's ranks and sizes, from the launcher's environment variables."""

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Read ranks and sizes from the launcher's variables; without them, a job of one rank."""
    for names in _LAUNCHERS:
        if all(environ.get(name, "").isdigit() for name in names):
            return Launch(*(int(environ[name]) for name in names))
    return Launch()


def read_tasks(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return this process's number and how many there are, as the launcher counts them.

    Returns:
        None where no launcher has started this process.
    """
    if any(all(name in environ for name in names) for names in _LAUNCHERS):
        launch = read_launch(environ)
        return launch.world_rank, launch.world_size
    rank, size = (environ.get(name, "") for name in _SRUN)
    return (int(rank), int(size)) if rank.isdigit() and size.isdigit() else None


def different_mpi(launched: int, size: int) -> tuple[str, str] | None:
    """Return what is wrong, and what to do, if the launcher's ranks do not see each other.

    Args:
        launched: how many ranks the launcher says it has started.
        size: how many MPI sees.
    """
    if launched <= size:
        return None
    return (
        f"the launcher started {launched} ranks, but MPI sees {size}: mpirun and mpi4py use "
        "different MPI libraries",
        "use the mpirun of this environment",
    )


def usable_cores() -> int:
    """Return the number of cores this process may run on (its CPU affinity)."""
    return max(1, len(os.sched_getaffinity(0)))


def prepare_environment(environ: MutableMapping[str, str], launch: Launch, cores: int) -> None:
    """Set the variables that MPI and OpenMP read at start-up, unless the user has set them.

    Open MPI makes each rank listen on every network, even if all ranks are on one host and use
    shared memory; in that case TCP is disabled.

    Every rank has a compute thread and a communication thread, so MPI must yield its core while it
    waits unless there are two cores per rank. (A 9.4 MB allreduce of 4 ranks on 2 cores over TCP
    took 2,200 ms spinning and 48 ms yielding.)

    Between hosts, MPI sends longer messages at once, without asking the receiver first: its answer
    would wait behind the data that the receiver itself sends. (A 9.4 MB allreduce of three hosts
    with 1 Gbit/s took 137 ms with that, and 111 ms without.)

    With fault tolerance across hosts, two components of Open MPI crash when a rank dies
    (open-mpi/ompi#13915), and a connection first opened after the failure hangs forever.
    """
    if 2 * launch.local_size > cores:
        environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if launch.local_size == launch.world_size:
        environ.setdefault("OMPI_MCA_btl", "^tcp")
    else:
        for name in _MESSAGE_LIMITS:
            environ.setdefault(name, str(EAGER_BYTES))
        if environ.get(FAULT_TOLERANCE) == "1":
            environ.setdefault("OMPI_MCA_coll", "^han,cuda")
            environ.setdefault("OMPI_MCA_mpi_preconnect_mpi", "1")
    environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // launch.local_size)))
