"""Starts mpirun with the same command: `kaitian-train -n 4 …`."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from kaitian_mpi.cli.logs import print_text
from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.forked_rank import FORK
from kaitian_mpi.runtime.launcher import END_TOKEN, end_line, find_launch
from kaitian_mpi.runtime.mpi_libraries import OPEN_MPI, RANKS_OF_OTHER_LAUNCHERS, Library
from kaitian_mpi.runtime.signals import CHECKPOINT_SIGNALS
from kaitian_mpi.supervise import mpirun_process
from kaitian_mpi.supervise.hosts import parse_hostfile
from kaitian_mpi.supervise.launch_command import (
    LaunchRequest,
    choose_ranks,
    find_mpirun,
    mpirun_options,
    shown_path,
)
from kaitian_mpi.supervise.mpirun_command import Command, read_hostfile
from kaitian_mpi.supervise.remote_hosts import check_hosts, find_agent, is_local

_FLAGS = {"ranks": "-n", "hostfile": "--hostfile", "no_fault_tolerance": "--no-fault-tolerance"}


def start_mpirun(program: str, arguments: Sequence[str], chosen: argparse.Namespace) -> NoReturn:
    """Replace this process by one that runs mpirun.

    Args:
        program: The command's name.
        arguments: The arguments of each rank.
        chosen: The values of `flags.add_launch_flags`, and others.

    Raises:
        UserError: mpirun cannot be started, or has started this process.
    """
    values = ((flag, getattr(chosen, name)) for name, flag in _FLAGS.items())
    launch_flags = [flag for flag, value in values if value is not None and value is not False]
    if find_launch(os.environ) or any(name in os.environ for name in RANKS_OF_OTHER_LAUNCHERS):
        raise UserError(
            f"{launch_flags[0]} starts mpirun, but this process is a rank already: "
            "remove it, or the launcher before the command (mpirun, srun)"
        )
    if chosen.hostfile == "":
        raise UserError("--hostfile has an empty value; name a file, or omit it")
    if chosen.ranks is None and not chosen.hostfile:
        raise UserError(f"{launch_flags[0]} requires -n; write the number of ranks, as in -n 4")
    _start(program, arguments, chosen)


def _start(program: str, arguments: Sequence[str], chosen: argparse.Namespace) -> NoReturn:
    hostfile = chosen.hostfile or ""
    hosts = parse_hostfile(read_hostfile(hostfile), hostfile) if hostfile else ()
    if hostfile and not hosts:
        raise UserError(f"--hostfile {hostfile} is empty; add a line for each host")
    request = LaunchRequest(
        ranks=choose_ranks(chosen.ranks, hosts, hostfile),
        hosts=hosts,
        hostfile=hostfile,
        has_remote=not all(is_local(host.name) for host in hosts),
        survives=not chosen.no_fault_tolerance,
    )
    mpirun = find_mpirun()
    if request.has_remote:
        agent = find_agent(Command(parts=(), arguments=()), os.environ)
        check_hosts(agent, hosts, {host.name: [sys.executable] for host in hosts})
    os.environ[END_TOKEN] = secrets.token_hex(8)
    options = mpirun_options(mpirun, request, os.environ, is_root=os.geteuid() == 0)
    rank_command = _program_words(program, request.has_remote)
    forked = request.ranks if _may_be_forked(mpirun.library, request) else 0
    words = [*options, *rank_command, *arguments]
    print_text(f"+ {shlex.join([shown_path(mpirun.path), *words])}", sys.stderr)
    token = end_line(os.environ[END_TOKEN])
    script = mpirun_process.__file__
    python = [sys.executable, "-I", "-S", script, program, token, str(forked)]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CHECKPOINT_SIGNALS)
    os.execv(sys.executable, [*python, mpirun.path, *words])  # noqa: S606  # no shell


def _may_be_forked(library: Library | None, request: LaunchRequest) -> bool:
    """Return whether one process may load torch for all ranks; see `runtime/forked_rank.py`.

    A rank of MPICH could not be forked, as it has a connection to its launcher.
    """
    if not hasattr(os, "pidfd_open") or os.environ.get(FORK) == "0":  # Linux has it
        return False
    return library is OPEN_MPI and request.ranks > 1 and not request.has_remote


def _program_words(program: str, has_remote: bool) -> list[str]:
    """Return the words that start this command again, on other hosts by its full path."""
    path = os.path.abspath(sys.argv[0])
    if os.path.basename(path) == program and os.access(path, os.X_OK):
        return [path if has_remote else shown_path(path)]
    return [sys.executable, "-m", f"kaitian_mpi.cli.{program.removeprefix('kaitian-')}"]
