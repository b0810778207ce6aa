"""Chooses mpirun and its options for `kaitian-train -n 4` and `kaitian-run -n 4`."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight.limited_process import run_all
from kaitian_mpi.runtime.mpi_libraries import (
    FORWARDED_BY_LAUNCHERS,
    IN_ALLOCATIONS,
    OPEN_MPI,
    Library,
    identify_launcher,
    release_numbers,
)
from kaitian_mpi.supervise.hosts import Host, total_slots

_VERSION_SEC = 10.0
_MPIRUN = ("mpirun", "mpiexec")
# Variables of a machine, a session or a batch job, which mean nothing on another host, or another
# thing: the devices in CUDA_VISIBLE_DEVICES are numbered by host.
_NOT_FORWARDED = re.compile(
    r"_.*|\w+_VISIBLE_DEVICES"
    r"|(BASH|DBUS|KUBERNETES|LMOD|LSB|LSF|MODULE|PBS|PE|SGE|SLURM|SSH|SUDO|TMUX|VTE|XDG)\w*_\w+"
    r"|DISPLAY|HOME|HOST|HOSTNAME|LESS\w*|LOGNAME|LS_COLORS|MAIL|OLDPWD|PS1|PWD|SHELL|SHLVL|STY"
    r"|TEMP|TMP|TMPDIR|TMUX|USER|WAYLAND_DISPLAY|WINDOWID|XAUTHORITY"
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Mpirun:
    """An mpirun."""

    path: str
    library: Library | None
    """Its MPI library; None for one that this package does not know."""
    release: str = ""

    @property
    def can_survive(self) -> bool:
        """Whether its jobs can survive the loss of a rank."""
        return self.library is not None and self.library.can_survive(self.release)


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """The command that mpirun starts, and its hosts."""

    ranks: int
    hosts: Sequence[Host] = ()
    """The hosts of the hostfile; empty without one."""
    hostfile: str = ""
    has_remote: bool = False
    """Whether one of the hosts is not this machine."""
    survives: bool = True
    """Whether the job is to survive the loss of a rank, if mpirun can do that."""


def find_mpirun() -> Mpirun:
    """Return the mpirun of this Python's environment, or else that of PATH."""
    folder = str(Path(sys.executable).parent)
    paths = [shutil.which(name, path=where) for where in (folder, None) for name in _MPIRUN]
    path = next(filter(None, paths), None)
    if path is None:
        raise UserError(
            "-n needs mpirun, and there is none in this environment or on PATH; install one with "
            'pip install "kaitian-mpi[mpi]", or load the module of this system\'s MPI'
        )
    answer = run_all({"": [path, "--version"]}, _VERSION_SEC)[""]
    library, release = identify_launcher(answer.out + answer.err)
    return Mpirun(path=path, library=library, release=release)


def choose_ranks(ranks: int | None, hosts: Sequence[Host], hostfile: str) -> int:
    """Return the number of ranks: as given, or one for each slot of the hosts."""
    slots = total_slots(hosts) if hosts else None
    if ranks is None:
        if not slots:
            raise UserError(
                f"--hostfile {hostfile}: it does not give each host's slots; write slots=N, or "
                "the number of ranks, -n N"
            )
        return slots
    if slots is not None and ranks > slots:
        raise UserError(
            f"--hostfile {hostfile}: there are only {slots} slots for {ranks} ranks; start fewer "
            "ranks, or add slots"
        )
    return ranks


def mpirun_options(
    mpirun: Mpirun, request: LaunchRequest, environ: Mapping[str, str], is_root: bool
) -> list[str]:
    """Return mpirun's options: root may use it, ranks may outnumber cores and use all of them."""
    count = ["-n", str(request.ranks)]
    if mpirun.library is None:
        return [*(["--hostfile", request.hostfile] if request.hostfile else []), *count]
    if mpirun.library is not OPEN_MPI:
        return [*_hosts_for_hydra(request), *count]
    options = ["--allow-run-as-root"] if is_root else []
    if request.survives and mpirun.can_survive:
        options += ["--with-ft", "ulfm"]
    if request.hostfile:
        # Also if a variable says otherwise: with `:oversubscribe` all go to the first host.
        options += ["--hostfile", request.hostfile, "--map-by", "slot"]
    elif not any(name in environ for name in IN_ALLOCATIONS):
        is_old = release_numbers(mpirun.release) < (5,)
        options += ["--oversubscribe"] if is_old else ["--map-by", ":oversubscribe"]
    options += ["--bind-to", "none"]
    if request.has_remote:
        options += [word for name in forwarded_names(environ) for word in ("-x", name)]
    return [*options, "-np", str(request.ranks)]


def _hosts_for_hydra(request: LaunchRequest) -> list[str]:
    """Return the hosts as MPICH's mpirun reads them: it does not know `slots=4`."""
    if not request.hostfile:
        return []
    names = [host.name if host.slots is None else f"{host.name}:{host.slots}"
             for host in request.hosts]  # fmt: skip
    return ["-hosts", ",".join(names)]


def forwarded_names(environ: Iterable[str]) -> list[str]:
    """Return the names of the variables to pass to other hosts, where mpirun does not itself."""
    return sorted(
        name
        for name in environ
        if _NAME.fullmatch(name)
        and not _NOT_FORWARDED.fullmatch(name)
        and not name.startswith(FORWARDED_BY_LAUNCHERS)
    )


def shown_path(path: str) -> str:
    """Return a program's name, if a shell finds this one by it; else its path."""
    executable = shutil.which(Path(path).name)
    return Path(path).name if executable and os.path.samefile(executable, path) else path
