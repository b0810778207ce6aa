"""The differences between MPI libraries: only this file names Open MPI's and MPICH's variables."""

from __future__ import annotations

import os
import re
import select
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Library:
    """An MPI library and its launcher, mpirun."""

    name: str
    """The library's name in mpi4py and its launcher."""
    rank_variables: tuple[str, str, str, str]
    """The variables of a rank's world rank, world size, local rank, and local size."""
    joining: str
    """The prefix of the variables by which a rank finds its launcher."""
    processes: tuple[str, ...]
    """The names of the processes that start ranks: mpirun, and its daemon on each host."""
    kills_soon: bool
    """Whether mpirun kills its ranks 0.25 s after SIGTERM or Ctrl-C, and drops their output."""
    survives_since: tuple[int, ...] | None
    """The first release in which a job can survive the loss of a rank (ULFM); None: none can."""
    version_pattern: str
    """Matches the release in what the launcher prints for `--version`."""

    def can_survive(self, release: str) -> bool:
        """Return whether a job can survive the loss of a rank with this release."""
        return self.survives_since is not None and release_numbers(release) >= self.survives_since


OPEN_MPI = Library(
    name="Open MPI",
    rank_variables=(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    joining="PMIX_",
    processes=("mpirun", "mpiexec", "prterun", "prted", "orterun", "orted"),
    kills_soon=True,
    survives_since=(5,),
    version_pattern=r"\(Open MPI\) ([\d.]+)",
)

# Intel MPI sets the same variables.
MPICH = Library(
    name="MPICH",
    rank_variables=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    joining="PMI_",
    processes=("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy"),
    kills_soon=False,
    survives_since=None,
    version_pattern=r"(?s)(?:HYDRA build details:.*?Version:|Intel\(R\) MPI.*?Version) +([\d.]+)",
)

LIBRARIES = (OPEN_MPI, MPICH)
"""In the order in which a process looks for its launcher's variables. Not Slurm: inside an
allocation, mpirun's ranks see the SLURM_* variables of their daemon."""

RANKS_OF_OTHER_LAUNCHERS = ("PMI_RANK", "PMIX_RANK", "PALS_RANKID", "MV2_COMM_WORLD_RANK")
"""Variables with a rank's number, set by launchers that may set none of the others."""

SRUN_FLAGS = {OPEN_MPI.name: "--mpi=pmix", MPICH.name: "--mpi=pmi2", "Intel MPI": "--mpi=pmi2"}
"""Settings with which tasks of Slurm's srun find each other through MPI."""

FORWARDED_PREFIX = "OMPI_"
"""Open MPI passes variables with such names to the ranks on all hosts; MPICH passes all."""

JOB_NAME = "PMIX_NAMESPACE"
"""The job's name, which Open MPI's launcher gives each rank."""

_ADDRESSES = "PMIX_SERVER_URI"  # with the version of its format at the end

APP_CONTEXTS = "OMPI_NUM_APP_CTX"
"""The number of commands, separated by colons, that Open MPI's mpirun was given."""

MAPPING_POLICIES = (
    "PRTE_MCA_rmaps_default_mapping_policy",
    "OMPI_MCA_rmaps_default_mapping_policy",
)
"""The variables that tell Open MPI how to distribute ranks over hosts."""

NOTICE_DEAD_HOSTS = {
    "PRTE_MCA_oob_tcp_keepalive_time": "3",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "1",
    "PRTE_MCA_oob_tcp_keepalive_probes": "3",
}
"""Settings with which Open MPI's mpirun probes a silent host after 3 s and considers it lost after
3 s more; by default, after 20 min."""

AGENT_PARAMETERS = ("plm_ssh_agent", "plm_rsh_agent")
"""Open MPI's parameter, in release 5 and in 4, with the command that reaches other hosts."""
AGENT_VARIABLES = (
    *(f"{prefix}{name}" for prefix in ("PRTE_MCA_", "OMPI_MCA_") for name in AGENT_PARAMETERS),
    "HYDRA_LAUNCHER_EXEC",
)
AGENT_OPTIONS = ("launcher-exec", "bootstrap-exec")
"""The same as an option of MPICH's mpirun."""

NETWORK_INTERFACES = "OMPI_MCA_btl_tcp_if_include"
"""Open MPI's list of network interfaces for TCP."""
NETWORK_INTERFACE = ("FI_TCP_IFACE", "FI_SOCKETS_IFACE")
"""The one network interface of libfabric, which MPICH and Intel MPI use."""

FORWARDED_BY_LAUNCHERS = ("OMPI_", "PRTE_", "PMIX_")
"""Prefixes of variables that Open MPI's launcher passes on, or has for itself."""
IN_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE")
"""Variables of the batch systems that tell mpirun the hosts."""

_SURVIVES = "OMPI_MCA_mpi_ft_enable"  # what `mpirun --with-ft ulfm` sets
_YIELDS = "OMPI_MCA_mpi_yield_when_idle"
_ANSWER_SEC = 5.0
_LONGEST_ANSWER = 1024
_KILLED_WITHIN_SEC = 1.0
_INT_BYTES = 4
_MESSAGE_LIMITS = "OMPI_MCA_btl_tcp_eager_limit", "OMPI_MCA_btl_tcp_max_send_size"

EAGER_BYTES = 264 << 10
"""The longest message over TCP, with MPI's header, that is sent without asking the receiver."""


def mpirun_address(environ: Mapping[str, str]) -> str:
    """Return where Open MPI's mpirun answers PMIx on this host; "" if only its daemon is here.

    The daemons, such as `job@0.3;tcp4://…`, know the ranks of their own hosts alone.
    """
    newest = max((name for name in environ if name.startswith(_ADDRESSES)), default="")
    address = environ.get(newest, "")
    return address if address.partition(";")[0].endswith(".0") else ""


def launched_by(environ: Mapping[str, str]) -> Library | None:
    """Return the library whose launcher has started this process; None if none has."""
    for library in LIBRARIES:
        if all(environ.get(name, "").isdigit() for name in library.rank_variables):
            return library
    return None


def identify_launcher(version: str) -> tuple[Library | None, str]:
    """Return the library and release of a launcher, from what it prints for `--version`."""
    for library in LIBRARIES:
        if match := re.search(library.version_pattern, version):
            return library, match[1]
    return None, ""


def release_numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a release, such as (5, 0, 11)."""
    return tuple(map(int, re.findall(r"\d+", release)))


def report_to_launcher(environ: Mapping[str, str]) -> None:
    """Let MPICH's mpirun (by PMI-1) end the job if this process ends before MPI starts."""
    if launcher := _connection(environ):
        with launcher, suppress(OSError):
            launcher.sendall(b"cmd=get_appnum\n")
            # No timeout of the socket's: it would hold for MPI, too.
            if select.select([launcher], [], [], _ANSWER_SEC)[0]:
                os.read(launcher.fileno(), _LONGEST_ANSWER)


def end_job_before_mpi(environ: Mapping[str, str], code: int) -> None:
    """Make MPICH's mpirun end the job with this exit code, before MPI has started."""
    if launcher := _connection(environ):
        with launcher, suppress(OSError):
            launcher.sendall(b"cmd=abort exitcode=%d\n" % code)
            time.sleep(_KILLED_WITHIN_SEC)


def _connection(environ: Mapping[str, str]) -> socket.socket | None:
    """Return the connection to MPICH's launcher, which MPI will use; None if there is none."""
    number = environ.get("PMI_FD", "")
    if launched_by(environ) is not MPICH or not number.isdigit():
        return None
    if not hasattr(socket, "SO_PEERCRED"):  # on Linux only
        return None
    try:
        launcher = socket.socket(fileno=os.dup(int(number)))
    except OSError:
        return None
    # In a process that a rank has started, the number may be that of another file.
    with suppress(OSError):
        credentials = launcher.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 3 * _INT_BYTES)
        pid = int.from_bytes(credentials[:_INT_BYTES], sys.byteorder)
        if Path(f"/proc/{pid}/comm").read_text().strip() in MPICH.processes:
            return launcher
    launcher.close()
    return None


def survival_requested(environ: Mapping[str, str]) -> bool:
    """Return whether the job was started with fault tolerance, by a launcher that has it."""
    if environ.get(_SURVIVES) != "1":
        return False
    return OPEN_MPI.rank_variables[0] in environ or MPICH.rank_variables[0] not in environ


def survival_advice(library: str) -> str:
    """Return advice on how a job can survive the loss of a rank."""
    name, _, release = library.rpartition(" ")
    if any(library.name == name and library.can_survive(release) for library in LIBRARIES):
        return "give mpirun --with-ft ulfm"
    return f"{library} cannot survive it; kaitian-supervise starts the job again"


def settings_for(
    local_size: int, world_size: int, cores: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables to set before MPI starts.

    On one host, no TCP, nor libfabric for one-sided messages, whose component sleeps for a second
    if it is not chosen (btl_ofi_component.c). Fewer than two cores a rank: yield while waiting (48
    ms instead of 2,200 for 9.4 MB of 4 ranks on 2 cores). Between hosts: send longer messages
    without asking first (111 ms instead of 137 with 1 Gbit/s); with ULFM, leave out two components
    that crash when a rank dies (open-mpi/ompi#13915) and connect at once: a connection opened after
    a failure hangs.
    """
    settings = {}
    if 2 * local_size > cores:
        settings[_YIELDS] = "1"
    if local_size == world_size:
        settings["OMPI_MCA_btl"] = "^tcp,ofi"
        return settings
    settings.update(dict.fromkeys(_MESSAGE_LIMITS, str(EAGER_BYTES)))
    if survival_requested(environ):
        settings["OMPI_MCA_coll"] = "^han,cuda"
        settings["OMPI_MCA_mpi_preconnect_mpi"] = "1"
    return settings


def loaded_library() -> str:
    """Return the name and release of the library that mpi4py has loaded, such as `MPICH 5.0.2`."""
    from mpi4py import MPI

    name, release = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, release))}"
