"""`kaitian-supervise`: restarts a job when a host is lost."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from kaitian_mpi.cli import run_flags
from kaitian_mpi.cli.flags import OneLineParser, launch_flags_in, parse_config
from kaitian_mpi.cli.logs import configure_logging
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices.emulation import KINDS_VARIABLE, SLOWDOWN_VARIABLE
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.folders import make_new_folder
from kaitian_mpi.supervise.environments import (
    Environments,
    check_devices,
    interpreters_of,
    read_environments,
    with_devices,
)
from kaitian_mpi.supervise.hosts import Host
from kaitian_mpi.supervise.hosts_file import HostChanges, HostsFile
from kaitian_mpi.supervise.job_runner import JobRunner
from kaitian_mpi.supervise.job_snapshots import JobSnapshots
from kaitian_mpi.supervise.mpirun_command import (
    FOLDERS,
    RUN,
    TRAIN,
    Command,
    parse_command,
    read_hosts,
)
from kaitian_mpi.supervise.remote_hosts import SECONDS as ANSWER_SEC
from kaitian_mpi.supervise.remote_hosts import PendingAnswer, find_agent, is_local, is_own_name
from kaitian_mpi.supervise.remote_shell import RemoteShell
from kaitian_mpi.supervise.starts import JobCommand, command_on, interpreter_of
from kaitian_mpi.supervise.supervisor import supervise
from kaitian_mpi.train.summary import NAME

PROGRAM = "kaitian-supervise"
_log = logging.getLogger("kaitian_mpi.cli.supervise")  # also if it is the main module
_ABOVE_ZERO = 5e-324  # the smallest float above 0
# The default, the least, the most and the help text of each flag.
_NUMBERS: dict[str, tuple[float, float, int, str]] = {
    "--host-backoff": (60.0, _ABOVE_ZERO, 86_400, "with --hosts-file: seconds before a lost host "
        "may rejoin; doubled each time it is lost again, up to an hour"),
    "--max-restarts": (3, 0, 1_000_000, "maximum number of restarts after failures; a restart "
        "because the hosts changed does not count"),
    "--probe-seconds": (4.0, _ABOVE_ZERO, 86_400, "seconds to wait for a host to answer after a "
        "failure"),
    "--hang-seconds": (5.0, 0, 86_400, "seconds that mpirun may keep running after its ranks on "
        "this machine have ended, as it does when the link to a host is down; 0: no limit"),
}  # fmt: skip


def main() -> None:
    """Run the command."""
    configure_logging("info", f"{PROGRAM}:")
    try:
        options = read_options(sys.argv[1:])
        hosts_file = HostsFile(options.hosts_file, _log.info) if options.hosts_file else None
        environments = read_environments(options.env) if options.env else {}
        job = make_job(options.command, hosts_file, environments)
        agent = find_agent(job.command, os.environ)
        changes = None
        if hosts_file is not None:
            ask = partial(ask_host, agent, job)
            changes = HostChanges(hosts_file, ask, _log.info, options.host_backoff)
        shell = RemoteShell(agent, options.probe_seconds)
        with JobRunner(job, shell, options.hang_seconds) as runner:
            snapshots = JobSnapshots(job, shell, runner.report)
            code = supervise(job, runner, shell, snapshots, options.max_restarts, changes)
        with suppress(OSError):  # removed only if nothing else was written to it
            if job.command.program == RUN:
                (job.folder / NAME).unlink(missing_ok=True)
            job.folder.rmdir()
    except UserError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


def make_parser() -> OneLineParser:
    """Return the command's parser."""
    parser = OneLineParser(
        PROGRAM,
        f"Run mpirun with {TRAIN} or {RUN}, and restart it after a failure, without the hosts "
        "that no longer answer, until the job has finished. A job that ends with a usage error is "
        f"not restarted. A script of {RUN} must resume from a checkpoint of its own. With "
        f"--hosts-file and {TRAIN}, hosts can join and leave while it runs.",
        f"{PROGRAM} mpirun --hostfile hosts.txt -np 8 $(which {TRAIN}) --model mobilenetv2",
        f"{PROGRAM} [flags] mpirun ... {TRAIN}|{RUN} ...",
    )
    parser.add(
        "--hosts-file",
        "the hosts, in place of mpirun's --hostfile and -np: lines such as node-a slots=4, "
        "with a rank for each slot; it is read again when it changes, and the job then restarts "
        "on the hosts in it and continues",
        "FILE",
    )
    parser.add(
        "--env",
        "a TOML file with each host's interpreter, as for kaitian-env; by default, all hosts use "
        "the same path",
        "FILE",
    )
    for flag, (default, _, _, text) in _NUMBERS.items():
        metavar = "N" if isinstance(default, int) else "X"
        parser.add(flag, f"{text} (default {default:g})", metavar, default)
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help=f"mpirun with its options, then {TRAIN} or {RUN} with its flags",
    )
    return parser


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse command-line arguments into options."""
    options = make_parser().parse_args(arguments)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if options.command and options.command[0].startswith("-"):
        make_parser().error(f"unrecognized arguments: {options.command[0]}")
    for flag, (_, least, most, _) in _NUMBERS.items():
        value = getattr(options, flag[2:].replace("-", "_"))
        if not least <= value <= most:  # false for NaN
            low = "above 0" if least == _ABOVE_ZERO else f"at least {least:g}"
            raise UserError(f"{flag} must be {low} and at most {most}, not {value}")
    return options


def make_job(
    words: Sequence[str],
    hosts_file: HostsFile | None = None,
    environments: Environments | None = None,
) -> JobCommand:
    """Read a command line, its hostfiles, and kaitian-train's flags."""
    command = parse_command(words)
    if command.program == RUN and hosts_file is not None:
        raise UserError(
            f"--hosts-file needs {TRAIN}, which saves and ends when the hosts change; name the "
            "hosts of a script by mpirun's --hostfile"
        )
    flags, config = read_flags(command)
    check_devices(command.program, flags, environments or {})
    if hosts_file is None:
        hosts, hostfiles = read_hosts(command)
    else:
        if config.emulate_kinds or config.emulate_slowdown:
            raise UserError(
                "--hosts-file cannot be combined with emulated kinds or slowdowns, which are "
                "listed by rank: the ranks' numbers change with the hosts; remove one of them"
            )
        command = command_on(command, hosts_file.path)
        hosts = hosts_file.hosts
        hostfiles = {}
    # With mpirun --wdir the run folder is relative to that directory.
    place = Path(*command.values(FOLDERS)[-1:])
    config = name_results(config, command.program, place)
    job = JobCommand(
        command=command,
        own_flags=len(flags),
        config=config,
        hosts=tuple(with_devices(hosts, environments or {})),
        local=frozenset(host.name for host in hosts if is_local(host.name)),
        hostfiles=hostfiles,
        folder=place / config.run_dir,
        job_id=secrets.token_hex(8),
        hosts_file=hosts_file.path if hosts_file is not None else "",
        environments=environments or {},
    )
    return job if hosts_file is None else job.with_hosts(hosts_file.hosts)


def read_flags(command: Command) -> tuple[Sequence[str], TrainConfig]:
    """Return the flags of the command's program without a script's own, and their settings.

    Those of kaitian-run are the emulation's only.
    """
    flags: Sequence[str] = command.arguments
    if command.program == RUN:
        chosen = run_flags.make_parser().parse_args(flags)
        flags = run_flags.own_flags(flags)
    if given := launch_flags_in(flags):
        raise UserError(
            f"{given[0]} of {command.program} starts mpirun itself; write mpirun before "
            f"{command.program} in its place, as in mpirun -np 4 {command.program}"
        )
    if command.program == RUN:
        emulated = {name: getattr(chosen, name) for name in ("emulate_kinds", "emulate_slowdown")}
        config = TrainConfig(**emulated)
    else:
        config = parse_config(TRAIN, flags)
    kinds = config.emulate_kinds or command.variable(KINDS_VARIABLE, os.environ)
    slowdown = config.emulate_slowdown or command.variable(SLOWDOWN_VARIABLE, os.environ)
    return flags, replace(config, emulate_kinds=kinds, emulate_slowdown=slowdown)


def name_results(config: TrainConfig, program: str, place: Path) -> TrainConfig:
    """Return the settings with a run folder, and a name of snapshots, if the user has given none.

    The folder is made, in `place`. A script has no snapshots.
    """
    snapshots = "" if program == RUN else config.snapshots or secrets.token_hex(16)
    run_dir = config.run_dir
    if not run_dir:
        of_script = Path(time.strftime("runs/script-%Y%m%d-%H%M%S"))
        name = of_script if program == RUN else config.choose_folder()
        run_dir = str(name.with_name(make_new_folder(place / name).name))
    return replace(config, run_dir=run_dir, snapshots=snapshots)


def ask_host(agent: Sequence[str], job: JobCommand, host: Host) -> PendingAnswer:
    """Start asking a host whether ranks can be started there; this machine is not asked by ssh."""
    pythons = interpreters_of(job.environments, host.name) or [interpreter_of(job.command)]
    is_local = is_own_name(host.name) or shutil.which(agent[0]) is None
    return PendingAnswer(agent, host, pythons, ANSWER_SEC, is_local)


if __name__ == "__main__":
    main()
