"""`kaitian-env`: one mpirun command for hosts whose interpreters are at different paths.

mpirun starts the same path on every host, unless its command has several parts with a colon between
them; each part has its own hosts and its own program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path, PurePath

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.command import FOLDERS, HOST_LISTS, RANKS, Command
from kaitian_mpi.runtime.hosts import Host, place_by_slot, total_slots
from kaitian_mpi.supervise.toml_text import parse_toml

PROGRAM = "kaitian-env"
_MODULES = {
    "kaitian-bench": "kaitian_mpi.cli.bench",
    "kaitian-doctor": "kaitian_mpi.cli.doctor",
    "kaitian-run": "kaitian_mpi.cli.run",
    "kaitian-train": "kaitian_mpi.cli.train",
}


def read_environments(path: str) -> dict[str, str]:
    """Read a file of environments; see `parse_environments`.

    Raises:
        UserError: it cannot be read, or is wrong.
    """
    try:
        return parse_environments(Path(path).read_text(), path)
    except (OSError, UnicodeDecodeError) as error:
        fault = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path}: {fault}; name a TOML file that can be read") from error


def parse_environments(text: str, path: str) -> dict[str, str]:
    """Parse a file of environments; return the path of each host's interpreter.

    Raises:
        UserError: it is not TOML, or a host's table has no `python`, or something else.
    """
    pythons = {}
    for host, table in parse_toml(text, path).items():
        found = table.get("python") if isinstance(table, dict) else None
        if not isinstance(found, str) or set(table) != {"python"}:
            raise UserError(
                f"{path}: [{host}]: found {table!r}, needed the path of its interpreter alone, "
                'such as python = "/opt/torch/bin/python"; quote a name with dots: ["node-b.lab"]'
            )
        if not found.startswith("/"):
            raise UserError(
                f"{path}: [{host}]: found python = {found!r}, needed a full path: ssh does not "
                "read your shell's settings"
            )
        pythons[host] = found
    return pythons


def command_for(program: Sequence[str], python: str) -> list[str]:
    """Return a program's command with an interpreter.

    Args:
        program: its name or path, and its arguments.
        python: the interpreter's path; empty: the command as it is.

    Raises:
        UserError: it is not one that an interpreter can be chosen for.
    """
    if not python:
        return list(program)
    name = PurePath(program[0]).name if program else ""
    if name in _MODULES:
        return [python, "-m", _MODULES[name], *program[1:]]
    if name.startswith("python"):
        return [python, *program[1:]]
    raise UserError(
        f"found {' '.join(program[:1]) or 'nothing'} as the program that mpirun starts, needed "
        f"one of {', '.join(_MODULES)}, or python with its arguments"
    )


def expand(
    command: Command, hosts: Sequence[Host], pythons: Mapping[str, str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Return mpirun's command with each host's own interpreter.

    Args:
        command: mpirun with its options, and the program.
        hosts: those of the command's hostfiles and host lists.
        pythons: the result of `parse_environments`; the others start the program as it is.

    Returns:
        The command, and the program's by host, for hosts that get a rank.

    Raises:
        UserError: a host is unknown or has no `slots`, or there are more ranks than slots.
    """
    ranks = _check_slots(command, hosts, pythons)
    placed = place_by_slot(hosts, ranks)
    counts = {host.name: placed.count(host.name) for host in hosts if host.name in placed}
    programs = {name: command_for(command.arguments, pythons.get(name, "")) for name in counts}
    options = command.replaced((*RANKS, *HOST_LISTS), [])
    launcher = next(at for at, part in enumerate(options.parts) if part.is_launcher)
    before = [word for part in options.parts[: launcher + 1] for word in part.words]
    after = [word for part in options.parts[launcher + 1 :] for word in part.words]
    parts = []
    for program, names in groupby(counts, key=lambda name: programs[name]):
        of_part = list(names)
        where = ",".join(f"{name}:{counts[name]}" for name in of_part)
        count = sum(counts[name] for name in of_part)
        parts.append(["--host", where, "-np", str(count), *program])
    words = [*before, *after, *parts[0]]
    # The first part's options hold for the whole job, and most may be there only once.
    of_each = [word for part in options.parts if part.name in FOLDERS for word in part.words]
    for part in parts[1:]:
        words += [":", *of_each, *part]
    return words, programs


def _check_slots(command: Command, hosts: Sequence[Host], pythons: Mapping[str, str]) -> int:
    """Return how many ranks there are.

    Raises:
        UserError: see `expand`.
    """
    names = [host.name for host in hosts]
    if unknown := [name for name in pythons if name not in names]:
        raise UserError(
            f"found an environment for {', '.join(unknown)}, needed hosts of the hostfile or of "
            f"--host: {', '.join(names) or 'there are none'}"
        )
    slots = total_slots(hosts)
    if slots is None:
        without = ", ".join(host.name for host in hosts if host.slots is None)
        raise UserError(f"found no slots for {without}; write slots=N, its ranks, in the hostfile")
    ranks = command.ranks or slots
    if ranks > slots:
        raise UserError(f"found {ranks} ranks for {slots} slots; start fewer, or give more slots")
    return ranks
