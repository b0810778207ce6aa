"""`--device-map`: which devices the ranks of each host take. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.supervise.toml_text import parse_toml

_EXAMPLE = 'such as node-a = ["cuda:0", "cuda:1"]'


def parse_device_map(text: str, path: str) -> dict[str, str]:
    """Parse a device map; return each host's devices as `--devices` takes them.

    Raises:
        UserError: it is not TOML, or a host's value is no list of devices.
    """
    content = parse_toml(text, f"--device-map {path}")
    if not content:
        raise UserError(f"--device-map {path}: found no host, needed a line for each, {_EXAMPLE}")
    return {host: _devices(host, value, path) for host, value in content.items()}


def _devices(host: str, value: Any, path: str) -> str:
    is_list = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
    if not is_list or any("," in one or not one.strip() for one in value):
        raise UserError(
            f"--device-map {path}: {host}: found {value!r}, needed a list with a device for each "
            f"local rank, {_EXAMPLE}; quote a name with dots"
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
    for name in (host, host.partition(".")[0]):
        if name in devices:
            return devices[name]
    for name in devices:
        if is_this_host(name):
            return devices[name]
    raise UserError(
        f"--device-map {path}: found no devices for {host}, needed a line for every host of the "
        f"job, {_EXAMPLE}; it has {', '.join(devices)}"
    )
