"""`kaitian-env`: starts mpirun with an interpreter of its own on each host, after asking each."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import PurePath

from kaitian_mpi.cli.flags import OneLineParser
from kaitian_mpi.cli.run_flags import own_flags
from kaitian_mpi.errors import UserError
from kaitian_mpi.supervise.environments import (
    check_devices,
    expand,
    interpreters_of,
    read_environments,
)
from kaitian_mpi.supervise.mpirun_command import RUN, parse_launcher, read_hosts
from kaitian_mpi.supervise.remote_hosts import check_hosts, find_agent

PROGRAM = "kaitian-env"


def main() -> None:
    """Run the command."""
    try:
        options = read_options(sys.argv[1:])
        words = plan(options)
        if options.print:
            print(shlex.join(words))
            return
        os.execvp(words[0], words)  # noqa: S606 (no shell)
    except FileNotFoundError:
        error = f"there is no {options.command[0]}; give the path of mpirun"
    except UserError as fault:
        error = str(fault)
    print(f"{PROGRAM}: error: {error}", file=sys.stderr)
    sys.exit(2)


def make_parser() -> OneLineParser:
    """Return the command's parser; arguments after the file's name are mpirun's command."""
    parser = OneLineParser(
        PROGRAM,
        "Start mpirun with each host's own Python environment. Before that, ask every host whether "
        "it answers and has the same version of this package.",
        f"{PROGRAM} environments.toml mpirun --hostfile hosts.txt -np 6 kaitian-train --model "
        "mobilenetv2",
        f"{PROGRAM} [-h] [--print] file mpirun ... kaitian-train ...",
    )
    parser.add("--print", "print mpirun's command and do nothing else")
    parser.add_argument(
        "file",
        help="a TOML file with a table for each host: python = the path of its interpreter; with "
        "several tables for a host, each also has the devices of its ranks",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="mpirun, its options, a program and its arguments"
    )
    return parser


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse command-line arguments."""
    options = make_parser().parse_args(arguments)
    if options.command[:1] == ["--print"]:
        options.print = True
        del options.command[0]
    if options.command[:1] == ["--"]:
        del options.command[0]
    read_environments(options.file)  # what is wrong with it comes first
    if not any(part.is_launcher for part in parse_launcher(options.command).parts):
        raise UserError(
            f"the command must start with mpirun, such as {PROGRAM} {options.file} mpirun "
            "--hostfile hosts.txt -np 4 kaitian-train --model mobilenetv2"
        )
    if ":" in options.command:
        raise UserError("the command needs one program, without ':'; kaitian-env adds the parts")
    return options


def plan(options: argparse.Namespace) -> list[str]:
    """Return mpirun's command; ask its hosts whether it can start, unless it is only printed."""
    environments = read_environments(options.file)
    launcher = parse_launcher(options.command)
    program = PurePath(*launcher.arguments[:1]).name
    flags: Sequence[str] = launcher.arguments[1:]
    if program == RUN:
        flags = own_flags(flags)
    check_devices(program, flags, environments)
    words, hosts = expand(launcher, read_hosts(launcher)[0], environments)
    if not options.print:
        pythons = {
            host.name: interpreters_of(environments, host.name) or [sys.executable]
            for host in hosts
        }
        check_hosts(find_agent(launcher, os.environ), hosts, pythons)
    return words


if __name__ == "__main__":
    main()
