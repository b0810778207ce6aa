"""Gathers the facts that cost nothing: neither a device nor a disk is used. Takes milliseconds."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from kaitian_mpi.preflight.facts import PACKAGES, Machine, Mpi, RankFacts, Software
from kaitian_mpi.preflight.host_checks import SHM
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.launcher import Launch, is_from_srun, read_launch
from kaitian_mpi.runtime.mpi_libraries import (
    COMPONENTS,
    DEVICE_AWARE,
    OPEN_MPI,
    SURVIVES,
    YIELDS,
    always_yields,
    loaded_library,
)
from kaitian_mpi.runtime.parent import hosts_of_launcher
from kaitian_mpi.runtime.system import usable_cores
from kaitian_mpi.runtime.tags import PROTOCOL

if TYPE_CHECKING:
    from mpi4py import MPI

_LARGEST_VALUE = 4096
_THREAD_MULTIPLE = 3
_THREADS = ("single", "funneled", "serialized", "multiple")


def read_settings(names: tuple[str, ...]) -> dict[str, bytes]:
    """Return the values of these parameters, as C would hold them; unknown ones are missing.

    Not collective. MPI must be initialized. Empty unless the library is Open MPI: others have
    other types of handles.
    """
    library = _open_library()
    if library is None:
        return {}
    if library.MPI_T_init_thread(_THREAD_MULTIPLE, ctypes.byref(ctypes.c_int())):
        return {}
    try:
        values = {name: _read(library, name.encode()) for name in names}
    finally:
        library.MPI_T_finalize()
    return {name: value for name, value in values.items() if value is not None}


def read_flag(values: dict[str, bytes], name: str) -> bool | None:
    """Return a parameter that is a truth value; None if it is unknown."""
    return None if name not in values else values[name][0] != 0


def read_text(values: dict[str, bytes], name: str) -> str:
    """Return a parameter that is a text; empty if it is unknown."""
    return values.get(name, b"").split(b"\0")[0].decode(errors="replace")


def _open_library() -> ctypes.CDLL | None:
    """Return the library that mpi4py has loaded, if it is Open MPI."""
    from mpi4py import MPI

    if MPI.get_vendor()[0] != OPEN_MPI.name:
        return None
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if Path(path).name.startswith("libmpi.so"):
                return ctypes.CDLL(path)  # the one that is loaded already
    return None


def _read(library: ctypes.CDLL, name: bytes) -> bytes | None:
    index, count, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if library.MPI_T_cvar_get_index(name, ctypes.byref(index)):
        return None
    if library.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)):
        return None
    value = ctypes.create_string_buffer(max(_LARGEST_VALUE, 8 * count.value))
    failed = library.MPI_T_cvar_read(handle, value)
    library.MPI_T_cvar_handle_free(ctypes.byref(handle))
    return None if failed else value.raw


def collect(host: str, rank: int) -> RankFacts:
    """Return what is known of this process without MPI, torch and devices."""
    launch = read_launch(os.environ)
    return RankFacts(
        rank=rank,
        host=host,
        local_rank=launch.local_rank,
        local_size=launch.local_size,
        software=Software(
            python=platform.python_version(),
            packages={name: _version(name) for name in PACKAGES},
            protocol=PROTOCOL,
        ),
        machine=_machine(),
        given_hosts=_given_hosts(launch),
    )


def collect_mpi(comm: MPI.Comm) -> Mpi:
    """Return what is known of MPI, which must be initialized. Not collective."""
    from mpi4py import MPI

    library = loaded_library()
    settings = read_settings((SURVIVES, YIELDS, *DEVICE_AWARE, *COMPONENTS))
    aware = [read_flag(settings, name) for name in DEVICE_AWARE if name in settings]
    return Mpi(
        library=library,
        threads=_THREADS[MPI.Query_thread()],
        size=comm.size,
        launched=read_launch(os.environ).world_size,
        by_srun=is_from_srun(os.environ),
        survives_requested=ulfm.is_enabled(),
        survives=read_flag(settings, SURVIVES),
        yields=always_yields(library) or read_flag(settings, YIELDS),
        device_aware=any(aware) if aware else None,
        transports={name: text for name in COMPONENTS if (text := read_text(settings, name))},
    )


def _given_hosts(launch: Launch) -> dict[str, int | None]:
    if launch.world_rank or launch.local_size < launch.world_size:
        return {}
    return {host.name: host.slots for host in hosts_of_launcher(os.getppid())}


def _version(package: str) -> str:
    """Return a package's version, of its module if that is loaded; empty if it is not installed."""
    module = sys.modules.get(package.replace("-", "_"))
    if module is not None and hasattr(module, "__version__"):
        return str(module.__version__)
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _machine() -> Machine:
    try:
        shm = os.statvfs(SHM)
    except OSError:
        shm = None
    return Machine(
        cores=len(usable_cores()),
        shm_bytes=None if shm is None else shm.f_blocks * shm.f_frsize,
        shm_free_bytes=None if shm is None else shm.f_bavail * shm.f_frsize,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        is_root=os.geteuid() == 0,
    )
