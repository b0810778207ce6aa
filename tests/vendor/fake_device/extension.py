"""Builds `device.cpp` once for each torch, loads it, and calls it.

The library is kept in the user's cache, or in a temporary folder where that is read-only: to build
it takes longer than most suites, and a new checkout, or environment, finds it there.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from kaitian_mpi.runtime.abort import abort_with_traceback

_SOURCE = Path(__file__).with_name("device.cpp")
_TORCH = Path(torch.__file__).parent
PRIVATE_USE_1 = 20
"""The number of torch's `DeviceType::PrivateUse1`."""


class NoCompilerError(ImportError):
    """There is no C++ compiler, without which there is no emulated device."""


def load() -> ctypes.PyDLL:
    """Return the library, built before if need be; ranks that come at once wait for the first."""
    torch.ops.load_library(path := _built())
    library = ctypes.PyDLL(path)
    library.fake_current_stream.restype = ctypes.c_int64
    library.fake_set_stream.argtypes = ctypes.c_int, ctypes.c_int64
    library.fake_is_pinned.argtypes = (ctypes.c_void_p,)
    return library


def _built() -> str:
    made_of = _SOURCE.read_bytes(), Path(__file__).read_bytes(), torch.__version__.encode()
    wanted = hashlib.sha256(b"".join(made_of)).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) / "kaitian-fake-device"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK)
    except OSError:
        is_writable = False
    if not is_writable:
        folder = Path(tempfile.gettempdir()) / f"fake-device-{os.getuid()}"
        folder.mkdir(exist_ok=True)
    path = folder / f"{wanted}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _build(path)
    return str(path)


def _build(path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NoCompilerError(
            "the emulated device of tests/vendor needs a C++ compiler; install one, such as by "
            "apt-get install g++"
        )
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    made = path.with_suffix(".tmp")
    include = _TORCH / "include"
    command = [
        *(compiler, "-shared", "-fPIC", "-O0", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *(f"-I{include}", f"-I{include}/torch/csrc/api/include", str(_SOURCE), "-o", str(made)),
        *(f"-L{_TORCH}/lib", "-lc10", "-ltorch_cpu", "-ltorch", "-include", "/dev/stdin"),
    ]
    # Its lists of operations, without its templates and all that it includes.
    header = (include / "ATen" / "autocast_mode.h").read_text()
    lists = re.findall(r"^#define AT_FORALL_(?:.*\\\n)+.*\n", header, re.MULTILINE)
    done = subprocess.run(command, input="".join(lists), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the emulated device cannot be built:\n{done.stderr}")
    made.rename(path)


_TYPES = {
    "allocate": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    "release": (None, ctypes.c_void_p),
    "record": (ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
    "block": (None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
    "query": (ctypes.c_int, ctypes.c_int64),
    "synchronize_event": (None, ctypes.c_int64),
    "destroy": (None, ctypes.c_int64),
    "synchronize_stream": (None, ctypes.c_int64, ctypes.c_int),
    "record_memory": (None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int),
    "new_stream": (ctypes.c_int64, ctypes.c_int),
}
"""What C++ calls, in the order of `Functions` there: what each returns, and what it is given."""
_POINTERS = {name: ctypes.CFUNCTYPE(*types) for name, types in _TYPES.items()}


class _Functions(ctypes.Structure):
    _fields_ = [*_POINTERS.items()]


_given: list[_Functions] = []  # which C++ calls as long as the process runs


def start(**functions: Callable) -> None:
    """Let C++ call these functions."""
    table = _Functions(*(_POINTERS[name](_or_abort(functions[name])) for name in _TYPES))
    _given.append(table)
    library.fake_start(ctypes.byref(table))


def _or_abort(function: Callable) -> Callable:
    """Return a function that ends the process where an error would only be printed by ctypes."""

    def call(*arguments):
        try:
            return function(*arguments)
        except BaseException:
            abort_with_traceback("the fake accelerator failed:\n")

    return call


library = load()
