"""The user's TOML files of what differs between hosts, and the mpirun command made from them.

mpirun starts the same path on every host, unless its command has several parts with a colon between
them; each part has its own hosts and its own program. A host may have several parts: a build of
torch is for one vendor's GPUs.
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
    """An environment that ranks of a host are started in."""

    python: str
    """The full path of its interpreter."""
    devices: tuple[str, ...] = ()
    """The device of each of its ranks, such as cuda:0; empty for as many ranks as the host takes,
    whose devices are detected."""


Environments = Mapping[str, Sequence[Environment]]
"""The environments of each host that has some of its own, in the order of their ranks."""

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
    found = []
    tables = value if isinstance(value, list) and value else [value]
    for table in tables:
        python = table.get("python") if isinstance(table, dict) else None
        # ssh does not read a shell's settings, so a name alone may be found nowhere.
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
        found.append(Environment(python, tuple(devices)))
    return tuple(found)


def _is_device_list(value: Any) -> bool:
    is_list = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
    return bool(is_list) and not any("," in each or not each.strip() for each in value)


def interpreters_of(environments: Environments, host: str) -> list[str]:
    """Return the interpreters of a host's environments, each once; none if it has no own ones."""
    return list(dict.fromkeys(each.python for each in environments.get(host, ())))


def check_devices(program: str, flags: Sequence[str], environments: Environments) -> None:
    """Check that a program's own flags do not list devices that the environments list too."""
    listed = any(each.devices for of_host in environments.values() for each in of_host)
    if listed and is_given("--devices", flags):
        raise UserError(
            f"--devices is given to {program}, and the environments list devices too; leave out "
            "either"
        )


def with_devices(hosts: Sequence[Host], environments: Environments) -> list[Host]:
    """Return the hosts; one whose environments have devices has a slot for each of these."""
    found = []
    for host in hosts:
        taken = sum(len(each.devices) for each in environments.get(host.name, ()))
        if host.slots is not None and taken > host.slots:
            raise UserError(
                f"the environments of {host.name} have {taken} devices, but it has only "
                f"{host.slots} slots; write slots={taken} in the hostfile"
            )
        found.append(replace(host, slots=taken or host.slots))
    return found


def expand(
    command: Command, hosts: Sequence[Host], environments: Environments
) -> tuple[list[str], list[Host]]:
    """Return mpirun's command with each host's own environments, and the hosts that get a rank.

    Without hosts in the command, they are those of the environments.
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
    # The first part's options hold for the whole job, and most may be there only once.
    of_each = [word for part in options if part.name in FOLDERS for word in part.words]
    for part in parts[1:]:
        words += [":", *of_each, *part]
    names = {places[n][0].name for n in used}
    return words, [host for host in hosts if host.name in names]


def _places(hosts: Sequence[Host], environments: Environments) -> list[_Place]:
    """Return each environment of each host, with the ranks it takes as the host's slots."""
    names = [host.name for host in hosts]
    if unknown := [name for name in environments if name not in names]:
        raise UserError(
            f"the environments name {', '.join(unknown)}, but the hostfile and --host have "
            f"{', '.join(names)}; correct either"
        )
    if not hosts:
        raise UserError("no hosts are known; name them in a hostfile, or in the environments")
    places: list[_Place] = []
    for host in with_devices(hosts, environments):
        own = environments.get(host.name, ())
        for each in own:
            places.append((replace(host, slots=len(each.devices) or host.slots), each))
        if not own:
            places.append((host, None))
    return places


def _program(
    program: Sequence[str], environment: Environment | None, of_host: Sequence[Environment]
) -> list[str]:
    """Return a program's command in an environment; without one, the command as it is."""
    name = PurePath(program[0]).name if program else ""
    if environment is None:
        return list(program)
    # By local rank, so that each has the devices of all.
    devices = ",".join(device for each in of_host for device in each.devices)
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
    """Return how many ranks there are, if every place has slots for its own."""
    slots = total_slots(numbered)
    if slots is None:
        without = ", ".join(host.name for host, _ in places if host.slots is None)
        raise UserError(f"no slots are known for {without}; write slots=N in a hostfile")
    ranks = command.ranks or slots
    if ranks > slots:
        raise UserError(f"{ranks} ranks have only {slots} slots; start fewer ranks, or add slots")
    return ranks
