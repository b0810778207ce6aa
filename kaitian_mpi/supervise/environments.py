"""Reads TOML files of the hosts' environments, and builds the mpirun command from them.

mpirun starts the same path on every host, unless its command has several parts separated by colons,
each with its own hosts and program. A host may need several parts, because a build of torch
supports one vendor's GPUs.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path, PurePath
from typing import Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.supervise.hosts import Host, place_by_slot, total_slots
from kaitian_mpi.supervise.mpirun_command import FOLDERS, HOST_LISTS, RANKS, Command, is_given

_PYTHON = 'python = "/opt/torch/bin/python"'
_KEYS = "python and devices"
_COMMANDS = ("kaitian-doctor", "kaitian-plan", "kaitian-run", "kaitian-train")


@dataclass(frozen=True)
class Environment:
    """A Python environment in which ranks of a host are started."""

    python: str
    """The full path of its interpreter."""
    devices: tuple[str, ...] = ()
    """The device of each of its ranks, such as cuda:0. If empty, the number of ranks is that of the
    host's slots, and their devices are detected."""


Environments = Mapping[str, Sequence[Environment]]
"""The environments of each host in the file, in the order of their ranks."""

_Place = tuple[Host, Environment | None]


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


def read_environments(path: str) -> dict[str, tuple[Environment, ...]]:
    """Return each host's environments in a file of environments."""
    return {
        host: _read_tables(f"{path}: [{host}]", value)
        for host, value in read_toml("the file of environments", path).items()
    }


def _read_tables(place: str, value: Any) -> tuple[Environment, ...]:
    environments = []
    tables = value if isinstance(value, list) and value else [value]
    for table in tables:
        python = table.get("python") if isinstance(table, dict) else None
        # ssh does not read the shell's settings, so a name may not be in its PATH.
        if not isinstance(python, str) or not python.startswith("/"):
            raise UserError(
                f"{place} must have the full path of its interpreter, such as {_PYTHON}; quote a "
                'name with dots: ["node-b.lab"]'
            )
        if unknown := set(table) - {"python", "devices"}:
            raise UserError(f"{place} has {', '.join(sorted(unknown))}; only {_KEYS} can be set")
        devices = table.get("devices", [])
        if (len(tables) > 1 or "devices" in table) and not _is_device_list(devices):
            raise UserError(
                f"{place} must have a list of devices, one for each rank of {python}, such as "
                'devices = ["cuda:0", "cuda:1"]'
            )
        environments.append(Environment(python, tuple(devices)))
    return tuple(environments)


def _is_device_list(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(name, str) and name.strip() and "," not in name for name in value)


def interpreters_of(environments: Environments, host: str) -> list[str]:
    """Return the distinct interpreters of a host's environments; none if the host is not listed."""
    return list(dict.fromkeys(environment.python for environment in environments.get(host, ())))


def check_devices(program: str, flags: Sequence[str], environments: Environments) -> None:
    """Check that not both the program's flags and the environments list devices."""
    listed = any(
        environment.devices for of_host in environments.values() for environment in of_host
    )
    if listed and is_given("--devices", flags):
        raise UserError(
            f"both --devices of {program} and the environments list devices; remove one of them"
        )


def with_devices(hosts: Sequence[Host], environments: Environments) -> list[Host]:
    """Return the hosts, with a slot for each device that their environments list."""
    with_slots = []
    for host in hosts:
        device_count = sum(
            len(environment.devices) for environment in environments.get(host.name, ())
        )
        if host.slots is not None and device_count > host.slots:
            raise UserError(
                f"the environments of {host.name} have {device_count} devices, but it has only "
                f"{host.slots} slots; write slots={device_count} in the hostfile"
            )
        with_slots.append(replace(host, slots=device_count or host.slots))
    return with_slots


def expand(
    command: Command, hosts: Sequence[Host], environments: Environments
) -> tuple[list[str], list[Host]]:
    """Return mpirun's command with the hosts' environments, and the hosts that get a rank.

    If the command names no hosts, those of the environments are used.
    """
    hosts = hosts or [Host(name=name) for name in environments]
    places = _places(hosts, environments)
    # A host has a place for each of its environments.
    numbered = [replace(host, name=str(n)) for n, (host, _) in enumerate(places)]
    counts = Counter(map(int, place_by_slot(numbered, _check_slots(command, numbered, places))))
    used = sorted(counts)
    programs = {
        n: _program(command.arguments, places[n][1], environments.get(places[n][0].name, ()))
        for n in used
    }
    parts = []
    for program, group in groupby(used, key=lambda n: programs[n]):
        of_part = list(group)
        where = ",".join(f"{places[n][0].name}:{counts[n]}" for n in of_part)
        ranks = sum(counts[n] for n in of_part)
        parts.append(["--host", where, "-np", str(ranks), *program])
    options = command.replaced((*RANKS, *HOST_LISTS), []).parts
    words = [word for part in options for word in part.words] + parts[0]
    # The first part's options apply to the whole job, and most may occur only once.
    folder_options = [word for part in options if part.name in FOLDERS for word in part.words]
    for part in parts[1:]:
        words += [":", *folder_options, *part]
    names = {places[n][0].name for n in used}
    return words, [host for host in hosts if host.name in names]


def _places(hosts: Sequence[Host], environments: Environments) -> list[_Place]:
    """Return each environment of each host, with its number of ranks as the host's slots."""
    names = [host.name for host in hosts]
    if unknown := [name for name in environments if name not in names]:
        raise UserError(
            f"the environments name {', '.join(unknown)}, but the hostfile and --host have "
            f"{', '.join(names)}; make them agree"
        )
    if not hosts:
        raise UserError("no hosts are known; name them in a hostfile, or in the environments")
    places: list[_Place] = []
    for host in with_devices(hosts, environments):
        host_environments = environments.get(host.name, ())
        for environment in host_environments:
            slots = len(environment.devices) or host.slots
            places.append((replace(host, slots=slots), environment))
        if not host_environments:
            places.append((host, None))
    return places


def _program(
    program: Sequence[str], environment: Environment | None, of_host: Sequence[Environment]
) -> list[str]:
    """Return a program's command in an environment; the unchanged command without one."""
    name = PurePath(program[0]).name if program else ""
    if environment is None:
        return list(program)
    # All devices of the host: each rank takes the one of its local rank.
    devices = ",".join(device for one in of_host for device in one.devices)
    if name in _COMMANDS:
        module = f"kaitian_mpi.cli.{name.removeprefix('kaitian-')}"
        flags = ["--devices", devices] if devices else []
        return [environment.python, "-m", module, *flags, *program[1:]]
    if name.startswith("python") and not devices:
        return [environment.python, *program[1:]]
    raise UserError(
        f"the {'devices' if devices else 'interpreter'} of {' '.join(program[:1]) or 'no program'} "
        f"cannot be chosen per host; the program must be {', '.join(_COMMANDS)}"
        + ("" if devices else ", or python with its arguments")
    )


def _check_slots(command: Command, numbered: Sequence[Host], places: Sequence[_Place]) -> int:
    """Return the number of ranks, after checking that the slots suffice."""
    slots = total_slots(numbered)
    if slots is None:
        without = ", ".join(host.name for host, _ in places if host.slots is None)
        raise UserError(f"no slots are known for {without}; write slots=N in a hostfile")
    ranks = command.ranks or slots
    if ranks > slots:
        raise UserError(
            f"there are only {slots} slots for {ranks} ranks; start fewer ranks, or add slots"
        )
    return ranks
