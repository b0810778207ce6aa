"""`kaitian-env`: starts mpirun with an interpreter of its own on each host, after asking each."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from kaitian_mpi import __version__
from kaitian_mpi.cli.flags import OneLineParser
from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.command import Command, parse_launcher, read_hosts
from kaitian_mpi.runtime.hosts import Host
from kaitian_mpi.supervise.environments import PROGRAM, expand
from kaitian_mpi.supervise.host_check import ask_hosts, version_faults
from kaitian_mpi.supervise.probe import find_agent, is_local
from kaitian_mpi.supervise.user_files import read_environments


def main() -> None:
    """Run the command."""
    try:
        options = read_options(sys.argv[1:])
        words, hosts, pythons = plan(options.file, options.command)
        if options.print:
            print(shlex.join(words))
            return
        check(parse_launcher(options.command), hosts, pythons)
        sys.stdout.flush()
        os.execvp(words[0], words)  # noqa: S606 (no shell)
    except FileNotFoundError:
        _fail(f"there is no {options.command[0]}; give the path of mpirun")
    except UserError as error:
        _fail(str(error), error.exit_code)


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser; arguments after the file's name are mpirun's command."""
    parser = OneLineParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [-h] [--print] file mpirun ... kaitian-train ...",
        description="Start mpirun with each host's own Python environment. Before that, ask every "
        "host whether it answers and has the same version of this package.",
        epilog=f"example: {PROGRAM} environments.toml mpirun --hostfile hosts.txt -np 6 "
        "kaitian-train --model mobilenetv2",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--print", action="store_true", help="print mpirun's command and do nothing else"
    )
    parser.add_argument(
        "file", help="a TOML file with a table for each host: python = the path of its interpreter"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="mpirun with its options, and a program"
    )
    return parser


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse command-line arguments.

    Raises:
        UserError: one is unknown or missing.
    """
    options = make_parser().parse_args(arguments)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not any(part.is_launcher for part in parse_launcher(options.command).parts):
        raise UserError(
            f"the command must start with mpirun, such as {PROGRAM} {options.file} mpirun "
            "--hostfile hosts.txt -np 4 kaitian-train --model mobilenetv2"
        )
    if ":" in options.command:
        raise UserError("the command must have one program, without ':'; the parts are made here")
    return options


def plan(file: str, command: Sequence[str]) -> tuple[list[str], list[Host], dict[str, str]]:
    """Return mpirun's command, its hosts, and the interpreter of each.

    Raises:
        UserError: a file cannot be read or is wrong, or the command cannot be divided.
    """
    given = read_environments(file)
    launcher = parse_launcher(command)
    hosts, _ = read_hosts(launcher)
    words, programs = expand(launcher, hosts, given)
    used = [host for host in hosts if host.name in programs]
    return words, used, {host.name: given.get(host.name, sys.executable) for host in used}


def check(command: Command, hosts: Sequence[Host], pythons: dict[str, str]) -> None:
    """Ask the hosts whether mpirun can start the ranks there.

    Raises:
        UserError: one cannot; it names each of them.
    """
    local = frozenset(host.name for host in hosts if is_local(host.name))
    answers = ask_hosts(find_agent(command, os.environ), hosts, pythons, local)
    faults = [answer.fault for answer in answers.values() if answer.fault]
    faults += version_faults(answers, __version__)
    if faults:
        raise UserError("; ".join(faults))


def _fail(text: str, code: int = 2) -> None:
    print(f"{PROGRAM}: error: {text}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
