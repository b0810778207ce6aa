"""`kaitian-supervise`: restarts a job when a host is lost."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kaitian_mpi.cli.flags import OneLineParser, parse_config
from kaitian_mpi.cli.logs import configure_logging
from kaitian_mpi.devices.emulation import KINDS_VARIABLE, SLOWDOWN_VARIABLE
from kaitian_mpi.errors import UserError
from kaitian_mpi.launch.allocation import read_hosts
from kaitian_mpi.launch.command import FOLDERS, parse_command
from kaitian_mpi.launch.command import PROGRAM as TRAIN
from kaitian_mpi.launch.probe import find_agent, is_local
from kaitian_mpi.output.folders import make_new_folder
from kaitian_mpi.supervision.process import Machine
from kaitian_mpi.supervision.starts import Job
from kaitian_mpi.supervision.supervisor import supervise

PROGRAM = "kaitian-supervise"
_MAX_SECONDS = 86_400
_MAX_RESTARTS = 1_000_000


def main() -> None:
    """Run the command."""
    configure_logging("info", f"{PROGRAM}:")
    try:
        options = read_options(sys.argv[1:])
        job = make_job(options.command)
        agent = find_agent(job.command, os.environ)
        limits = (options.probe_seconds, options.hang_seconds)
        with Machine(job, agent, *limits) as machine:
            code = supervise(job, machine, options.max_restarts)
        with suppress(OSError):  # removed only if nothing was written to it
            job.folder.rmdir()
    except UserError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = OneLineParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [-h] [--max-restarts N] [--probe-seconds X] [--hang-seconds X] "
        f"mpirun ... {TRAIN} ...",
        description=f"Run mpirun with {TRAIN}, and restart it after a failure, without the hosts "
        "that no longer answer, until the job has finished. A job that ends with a usage error "
        "is not restarted.",
        epilog=f"example: {PROGRAM} mpirun --hostfile hostfiles/two-nodes.txt -np 4 {TRAIN} "
        "--model mobilenetv2",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        metavar="N",
        help="restart the job at most this many times (default 3)",
    )
    parser.add_argument(
        "--probe-seconds",
        type=float,
        default=4.0,
        metavar="X",
        help="seconds that a host may take to answer after a failure (default 4)",
    )
    parser.add_argument(
        "--hang-seconds",
        type=float,
        default=5.0,
        metavar="X",
        help="seconds that mpirun may keep running after its ranks on this machine have ended, as "
        "it does when the link to a host is down; 0: no limit (default 5)",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help=f"mpirun with its options, then {TRAIN} with its flags",
    )
    return parser


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse command-line arguments into options.

    Raises:
        UserError: an option is unknown or invalid.
    """
    options = make_parser().parse_args(arguments)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if options.command and options.command[0].startswith("-"):
        raise UserError(f"unrecognized arguments: {options.command[0]}; see {PROGRAM} --help")
    if not 0 <= options.max_restarts <= _MAX_RESTARTS:
        raise UserError(
            f"--max-restarts: found {options.max_restarts}, needed 0 or more, and at most "
            f"{_MAX_RESTARTS}"
        )
    if not 0 < options.probe_seconds <= _MAX_SECONDS:
        raise UserError(
            f"--probe-seconds: found {options.probe_seconds}, needed more than 0, and at most "
            f"{_MAX_SECONDS}"
        )
    if not 0 <= options.hang_seconds <= _MAX_SECONDS:
        raise UserError(
            f"--hang-seconds: found {options.hang_seconds}, needed 0 or more, and at most "
            f"{_MAX_SECONDS}"
        )
    return options


def make_job(words: Sequence[str]) -> Job:
    """Read a command line, its hostfiles, and the flags of kaitian-train.

    Raises:
        UserError: one of them is invalid; nothing has been started yet.
    """
    command = parse_command(words)
    config = parse_config(TRAIN, command.arguments)
    hosts, hostfiles = read_hosts(command)
    # With mpirun --wdir the run folder is relative to that directory.
    place = Path(*command.values(FOLDERS)[-1:])
    run_dir = config.run_dir
    if not run_dir:
        name = config.choose_folder()
        run_dir = str(name.with_name(make_new_folder(place / name).name))
    return Job(
        command=command,
        hosts=hosts,
        local=frozenset(host.name for host in hosts if is_local(host.name)),
        hostfiles=hostfiles,
        run_dir=run_dir,
        folder=place / run_dir,
        snapshots=config.snapshots or secrets.token_hex(16),
        job_id=secrets.token_hex(8),
        keep_checkpoints=config.keep_checkpoints,
        emulate_kinds=config.emulate_kinds or command.variable(KINDS_VARIABLE, os.environ),
        emulate_slowdown=config.emulate_slowdown or command.variable(SLOWDOWN_VARIABLE, os.environ),
        spares=config.spares,
    )


if __name__ == "__main__":
    main()
