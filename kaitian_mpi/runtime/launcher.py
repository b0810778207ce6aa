"""Reads rank and size from the launcher's environment, and sets MPI's, before MPI starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from kaitian_mpi.runtime.mpi_libraries import (
    FORWARDED_PREFIX,
    RANKS_OF_OTHER_LAUNCHERS,
    SRUN_FLAGS,
    launched_by,
    settings_for,
)
from kaitian_mpi.runtime.system import CHOSEN_THREADS_VARIABLE, THREADS_VARIABLE

# srun's are tried last: inside an allocation mpirun's ranks see those of their daemon. MPI may or
# may not find the other tasks.
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID")
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0  # of Slurm's own, such as the shell of salloc

SUPERVISED = f"{FORWARDED_PREFIX}KAITIAN_JOB"
SUPERVISED_FOLDER = f"{FORWARDED_PREFIX}KAITIAN_JOB_FOLDER"
"""Set by `kaitian-supervise`; reaches the ranks on all hosts."""

END_TOKEN = f"{FORWARDED_PREFIX}KAITIAN_END"
"""Set by `kaitian-train -n`; a rank whose work is done writes it to stderr."""


@dataclass(frozen=True)
class Launch:
    """This process's ranks and sizes, from the launcher's environment variables."""

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1


def end_line(token: str) -> str:
    """Return the line of a rank whose work is done; it begins with a rare character."""
    return f"\x1e{token}"


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Read ranks and sizes from the launcher's variables; without them, a job of one rank."""
    return find_launch(environ) or Launch()


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """Read ranks and sizes from the launcher's variables; None without a launcher."""
    library = launched_by(environ)
    if library is None:
        return _read_srun(environ)
    return Launch(*(int(environ[name]) for name in library.rank_variables))


def is_from_srun(environ: Mapping[str, str]) -> bool:
    """Return whether srun has started this process itself, not mpirun's daemon."""
    return launched_by(environ) is None and _read_srun(environ) is not None


def _read_srun(environ: Mapping[str, str]) -> Launch | None:
    """Return this process's place in srun's job; None if srun has not started it."""
    if not all(environ.get(name, "").isdigit() for name in _SRUN):
        return None
    rank, size, local_rank, node, step = (int(environ[name]) for name in _SRUN)
    per_node = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [int(tasks) for tasks, nodes in per_node for _ in range(int(nodes or 1))]
    if step >= _FIRST_SPECIAL_STEP or node >= len(tasks):
        return None
    return Launch(rank, size, local_rank, tasks[node])


def different_mpi(launched: int, size: int, library: str, by_srun: bool) -> tuple[str, str] | None:
    """Return a fault, with advice, if the launcher's ranks do not see each other."""
    if launched <= size:
        return None
    if not by_srun:
        return (
            f"the launcher started {launched} ranks, but MPI sees {size}: mpirun and mpi4py use "
            "different MPI libraries",
            "use the mpirun of this environment",
        )
    flags = [flag for name, flag in SRUN_FLAGS.items() if library.startswith(name)]
    flag = flags[0] if flags else "--mpi=pmix or --mpi=pmi2"
    return (
        f"srun started {launched} tasks, but MPI sees {size}: without the right --mpi each task is "
        "a job of its own",
        f"give srun {flag} (srun --mpi=list shows what this Slurm has), or use mpirun inside the "
        "allocation instead of srun",
    )


def unlaunched(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a fault, with advice, if this is the only rank in a larger allocation."""
    if find_launch(environ) or any(name in environ for name in RANKS_OF_OTHER_LAUNCHERS):
        return None
    allocated = "the launcher of an MPIJob" if environ.get("K_MPI_JOB_ROLE") == "launcher" else ""
    units = {"JOB_NUM_NODES": "nodes", "NTASKS": "tasks", "HET_SIZE": "components"}
    for name, unit in units.items():
        number = environ.get(f"SLURM_{name}", "")
        if "SLURM_JOB_ID" in environ and number.isdigit() and int(number) > 1:
            allocated = f"a Slurm job of {number} {unit}"
    if not allocated:
        return None
    return (
        f"this is the only rank in {allocated}: neither mpirun nor srun started it",
        "write mpirun before the command; for one rank, mpirun -np 1",
    )


def prepare_environment(environ: MutableMapping[str, str], launch: Launch, cores: int) -> None:
    """Set the variables that MPI and OpenMP read at start-up, unless the user has set them."""
    settings = settings_for(launch.local_size, launch.world_size, cores, environ)
    if THREADS_VARIABLE not in environ:
        threads = str(max(1, cores // launch.local_size))
        environ[THREADS_VARIABLE] = environ[CHOSEN_THREADS_VARIABLE] = threads
    for name, value in settings.items():
        environ.setdefault(name, value)
