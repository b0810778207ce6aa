"""The user's TOML files: `--env`, an interpreter per host; `--device-map`, devices per host."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kaitian_mpi.errors import UserError

_PYTHON = 'python = "/opt/torch/bin/python"'
_DEVICES = 'node-a = ["cuda:0", "cuda:1"]'


def parse_toml(content: bytes | str, source: str) -> dict[str, Any]:
    """Parse the content of a TOML file.

    Args:
        content: its bytes or text.
        source: the flag and the file, for the error message.

    Raises:
        UserError: it is not TOML, or not UTF-8.
    """
    try:
        return tomllib.loads(content.decode() if isinstance(content, bytes) else content)
    except (ValueError, RecursionError) as error:
        fault = " ".join(str(error).split())
        raise UserError(f"{source} is not valid TOML ({fault}); correct it") from error


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
        UserError: it is not TOML, or a host's table is not just `python` with a full path.
    """
    pythons = {}
    for host, table in parse_toml(text, path).items():
        python = table.get("python") if isinstance(table, dict) else None
        if not isinstance(python, str) or set(table) != {"python"}:
            raise UserError(
                f"{path}: [{host}] must have the path of its interpreter and nothing else, such as "
                f'{_PYTHON}; quote a name with dots: ["node-b.lab"]'
            )
        if not python.startswith("/"):
            raise UserError(
                f"{path}: [{host}]: python = {python!r} is not a full path; write one, because ssh "
                "does not read your shell's settings"
            )
        pythons[host] = python
    return pythons


def parse_device_map(text: str, path: str) -> dict[str, str]:
    """Parse a device map; return each host's devices as `--devices` takes them.

    Raises:
        UserError: it is not TOML, or a host's value is not a list of devices.
    """
    content = parse_toml(text, f"--device-map {path}")
    if not content:
        raise UserError(
            f"--device-map {path} is empty; add a line for each host, such as {_DEVICES}"
        )
    return {host: _devices(host, value, path) for host, value in content.items()}


def _devices(host: str, value: Any, path: str) -> str:
    is_list = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
    if not is_list or any("," in each or not each.strip() for each in value):
        raise UserError(
            f"--device-map {path}: {host}: {value!r} is not a list with a device for each local "
            f"rank; write one, such as {_DEVICES}; quote a name with dots"
        )
    return ",".join(value)


def devices_for(
    devices: Mapping[str, str], host: str, is_this_host: Callable[[str], bool], path: str
) -> str:
    """Return the devices of this host.

    Args:
        devices: the result of `parse_device_map`.
        host: this host's name.
        is_this_host: whether another name or an address is this host's.
        path: the file, for the error message.

    Raises:
        UserError: the map does not have this host.
    """
    for name in (host, host.partition(".")[0], *filter(is_this_host, devices)):
        if name in devices:
            return devices[name]
    raise UserError(
        f"--device-map {path} has no devices for {host}, only for {', '.join(devices)}; add a line "
        f"for every host of the job, such as {_DEVICES}"
    )
