"""What the launcher says about this process before MPI starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

# (world rank, world size, local rank, local size), in the order they are asked. Slurm is last:
# inside an allocation mpirun's ranks also see the SLURM_* variables of their daemon.
_LAUNCHERS = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
"""What `mpirun --with-ft ulfm` sets."""

SUPERVISED = "OMPI_KAITIAN_JOB"
"""What `kaitian-supervise` sets, so that Open MPI hands it to the ranks of all hosts."""


@dataclass(frozen=True)
class Launch:
    """This process's place in the job, as the launcher's environment tells it."""

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Read this process's place from the launcher's variables; a lone rank without them."""
    for names in _LAUNCHERS:
        if all(environ.get(name, "").isdigit() for name in names):
            return Launch(*(int(environ[name]) for name in names))
    return Launch()


def usable_cores() -> int:
    """Return the number of cores this process may run on."""
    return max(1, len(os.sched_getaffinity(0)))


def prepare_environment(environ: MutableMapping[str, str], launch: Launch, cores: int) -> None:
    """Set what MPI and OpenMP read when they start; what the user has set stays.

    Open MPI has each rank listen on every network, even if all ranks are on one host and share
    memory; there it is told not to.

    Every rank has a thread that computes and one that communicates, so MPI must give its core away
    while it waits unless there are two cores a rank. (A 9.4 MB allreduce of 4 ranks on 2 cores over
    TCP took 2,200 ms spinning and 48 ms yielding.)

    Where a rank's death is to be survived across hosts, two components of Open MPI crash in it
    (open-mpi/ompi#13915), and a connection first asked for afterwards waits for ever.
    """
    if 2 * launch.local_size > cores:
        environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if launch.local_size == launch.world_size:
        environ.setdefault("OMPI_MCA_btl", "^tcp")
    elif environ.get(FAULT_TOLERANCE) == "1":
        environ.setdefault("OMPI_MCA_coll", "^han,cuda")
        environ.setdefault("OMPI_MCA_mpi_preconnect_mpi", "1")
    environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // launch.local_size)))
