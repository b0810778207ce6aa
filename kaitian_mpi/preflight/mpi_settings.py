"""Asks Open MPI for the values of its parameters in this process, by MPI's tool interface.

Environment variables say what was asked for; these values say what holds.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

from kaitian_mpi.runtime.mpi_libraries import OPEN_MPI

_LARGEST_VALUE = 4096
_THREAD_MULTIPLE = 3


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
