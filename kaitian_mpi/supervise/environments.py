"""`kaitian-env`: one mpirun command for hosts whose interpreters are at different paths.

mpirun starts the same path on every host, unless its command has several parts with a colon between
them; each part has its own hosts and its own program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import PurePath

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.command import FOLDERS, HOST_LISTS, RANKS, Command
from kaitian_mpi.runtime.hosts import Host, place_by_slot, total_slots

PROGRAM = "kaitian-env"
_MODULES = {
    "kaitian-doctor": "kaitian_mpi.cli.doctor",
    "kaitian-plan": "kaitian_mpi.cli.plan",
    "kaitian-run": "kaitian_mpi.cli.run",
    "kaitian-train": "kaitian_mpi.cli.train",
}


def command_for(program: Sequence[str], python: str) -> list[str]:
    """Return a program's command with an interpreter; without one, the command as it is.

    Raises:
        UserError: the program is not one for which an interpreter can be chosen.
    """
    if not python:
        return list(program)
    name = PurePath(program[0]).name if program else ""
    if name in _MODULES:
        return [python, "-m", _MODULES[name], *program[1:]]
    if name.startswith("python"):
        return [python, *program[1:]]
    raise UserError(
        f"mpirun cannot start {' '.join(program[:1]) or 'nothing'} with an interpreter per host; "
        f"name {', '.join(_MODULES)}, or python with its arguments"
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
    """Return how many ranks there are; see `expand` for the errors."""
    names = [host.name for host in hosts]
    if unknown := [name for name in pythons if name not in names]:
        raise UserError(
            f"the environments name {', '.join(unknown)}, but the hostfile and --host have "
            f"{', '.join(names) or 'no host'}; correct either"
        )
    slots = total_slots(hosts)
    if slots is None:
        without = ", ".join(host.name for host in hosts if host.slots is None)
        raise UserError(f"the hostfile has no slots for {without}; write slots=N, its ranks")
    ranks = command.ranks or slots
    if ranks > slots:
        raise UserError(f"{ranks} ranks have only {slots} slots; start fewer ranks, or add slots")
    return ranks
