"""The user's TOML files with something for each host, and mpirun's command with such interpreters.

mpirun starts the same path on every host, unless its command has several parts with a colon between
them; each part has its own hosts and its own program.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path, PurePath
from typing import Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.hosts import Host, place_by_slot, total_slots
from kaitian_mpi.runtime.mpirun_command import FOLDERS, HOST_LISTS, RANKS, Command

_PYTHON = 'python = "/opt/torch/bin/python"'
_DEVICES = 'node-a = ["cuda:0", "cuda:1"]'
_COMMANDS = ("kaitian-doctor", "kaitian-plan", "kaitian-run", "kaitian-train")


def read_toml(source: str, path: str) -> dict[str, Any]:
    """Return the content of a TOML file."""
    try:
        content = Path(path).expanduser().read_bytes()
        return tomllib.loads(content.decode())
    except OSError as error:
        fault = f": {error.strerror}; name a TOML file that can be read"
    except (ValueError, RecursionError) as error:
        fault = f" is not valid TOML ({' '.join(str(error).split())}); correct it"
    raise UserError(f"{source} {path}{fault}")


def read_environments(path: str) -> dict[str, str]:
    """Return the path of each host's interpreter in a file of environments."""
    pythons = {}
    for host, table in read_toml("the file of environments", path).items():
        python = table.get("python") if isinstance(table, dict) else None
        # ssh does not read a shell's settings, so a name alone may be found nowhere.
        if not isinstance(python, str) or set(table) != {"python"} or not python.startswith("/"):
            raise UserError(
                f"{path}: [{host}] must have the full path of its interpreter and nothing else, "
                f'such as {_PYTHON}; quote a name with dots: ["node-b.lab"]'
            )
        pythons[host] = python
    return pythons


def read_device_map(path: str) -> dict[str, str]:
    """Return each host's devices in a device map, as `--devices` takes them."""
    content = read_toml("--device-map", path)
    if not content:
        raise UserError(f"--device-map {path} is empty; add a line for each host: {_DEVICES}")
    for host, value in content.items():
        is_list = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
        if not is_list or any("," in each or not each.strip() for each in value):
            raise UserError(
                f"--device-map {path}: {host}: {value!r} is not a list with a device for each "
                f"local rank; write one, such as {_DEVICES}; quote a name with dots"
            )
    return {host: ",".join(value) for host, value in content.items()}


def devices_for(
    devices: Mapping[str, str], host: str, is_this_host: Callable[[str], bool], path: str
) -> str:
    """Return the devices of a host in the device map at `path`, by any of the host's names."""
    for name in (host, host.partition(".")[0], *filter(is_this_host, devices)):
        if name in devices:
            return devices[name]
    raise UserError(
        f"--device-map {path} has no devices for {host}, only for {', '.join(devices)}; add a line "
        f"for every host of the job, such as {_DEVICES}"
    )


def expand(
    command: Command, hosts: Sequence[Host], pythons: Mapping[str, str]
) -> tuple[list[str], list[Host]]:
    """Return mpirun's command with each host's own interpreter, and the hosts that get a rank."""
    placed = place_by_slot(hosts, _check_slots(command, hosts, pythons))
    used = [host for host in hosts if host.name in placed]
    programs = {host.name: _program(command.arguments, pythons.get(host.name, "")) for host in used}
    parts = []
    for program, names in groupby(programs, key=lambda name: programs[name]):
        counts = {name: placed.count(name) for name in names}
        where = ",".join(f"{name}:{count}" for name, count in counts.items())
        parts.append(["--host", where, "-np", str(sum(counts.values())), *program])
    options = command.replaced((*RANKS, *HOST_LISTS), []).parts
    words = [word for part in options for word in part.words] + parts[0]
    # The first part's options hold for the whole job, and most may be there only once.
    of_each = [word for part in options if part.name in FOLDERS for word in part.words]
    for part in parts[1:]:
        words += [":", *of_each, *part]
    return words, used


def _program(program: Sequence[str], python: str) -> list[str]:
    """Return a program's command with an interpreter; without one, the command as it is."""
    name = PurePath(program[0]).name if program else ""
    if not python:
        return list(program)
    if name in _COMMANDS:
        module = f"kaitian_mpi.cli.{name.removeprefix('kaitian-')}"
        return [python, "-m", module, *program[1:]]
    if name.startswith("python"):
        return [python, *program[1:]]
    raise UserError(
        f"the interpreter of {' '.join(program[:1]) or 'no program'} cannot be chosen per host; "
        f"the program must be {', '.join(_COMMANDS)}, or python with its arguments"
    )


def _check_slots(command: Command, hosts: Sequence[Host], pythons: Mapping[str, str]) -> int:
    """Return how many ranks there are, if every host has slots for its own."""
    names = [host.name for host in hosts]
    if unknown := [name for name in pythons if name not in names]:
        raise UserError(
            f"the environments name {', '.join(unknown)}, but the hostfile and --host have "
            f"{', '.join(names) or 'no host'}; correct either"
        )
    slots = total_slots(hosts)
    if slots is None:
        without = ", ".join(host.name for host in hosts if host.slots is None)
        raise UserError(f"the hostfile has no slots for {without}; write slots=N for N ranks")
    ranks = command.ranks or slots
    if ranks > slots:
        raise UserError(f"{ranks} ranks have only {slots} slots; start fewer ranks, or add slots")
    return ranks
