"""Limits communication between hosts to some network interfaces: `--network-interface`."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, MutableMapping
from typing import TYPE_CHECKING

import psutil

from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import agree_on_errors
from kaitian_mpi.runtime.lifecycle import initialize_mpi
from kaitian_mpi.runtime.mpi_libraries import NETWORK_INTERFACE, NETWORK_INTERFACES

if TYPE_CHECKING:
    from mpi4py import MPI

FLAG = "--network-interface"

_GLOO = "GLOO_SOCKET_IFNAME"
_EXACT = ("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
"""Variables of vendors' libraries, which take prefixes of names or, after `=`, exact names."""


def initialize_mpi_on(interfaces: str) -> MPI.Intracomm:
    """Initialize MPI, with its TCP connections on these interfaces; return `COMM_WORLD`.

    Collective over all ranks.
    """
    fault = None
    try:
        limit_to(interfaces, os.environ, found_interfaces())
    except UserError as error:
        fault = error  # the other ranks would wait for this one to start MPI
    comm = initialize_mpi()
    with agree_on_errors(comm):
        if fault is not None:
            raise fault
    return comm


def limit_to(
    interfaces: str, environ: MutableMapping[str, str], available: Collection[str]
) -> None:
    """Set the variables that MPI and vendors' libraries read when they start."""
    names = [name.strip() for name in interfaces.split(",") if name.strip()]
    if not names:
        if interfaces:
            raise UserError(
                f"{FLAG}: {interfaces!r} names no interface; give names such as eth0 or eth0,eth1"
            )
        return
    if missing := [name for name in names if name not in available]:
        raise UserError(
            f"{FLAG}: no interface {', '.join(missing)} is up on {socket.gethostname()}; choose "
            f"from {', '.join(sorted(available)) or '(none is up)'}, see `ip addr`"
        )
    listed = ",".join(names)
    environ[NETWORK_INTERFACES] = environ[_GLOO] = listed
    environ.update(dict.fromkeys(_EXACT, f"={listed}"))
    environ.update(dict.fromkeys(NETWORK_INTERFACE, names[0]))


def found_interfaces() -> list[str]:
    """Return this host's interfaces that are up and reach other hosts."""
    flags = {name: stats.flags.split(",") for name, stats in psutil.net_if_stats().items()}
    return [name for name, has in flags.items() if "up" in has and "loopback" not in has]
