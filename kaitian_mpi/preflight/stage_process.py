"""One examination in a process of its own; writes its facts to stdout as JSON.

python -P -m kaitian_mpi.preflight.stage_process NAME ARGUMENTS
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kaitian_mpi.preflight.facts import Storage
from kaitian_mpi.runtime.abort import is_mpi_running
from kaitian_mpi.runtime.system import prctl

if TYPE_CHECKING:
    from mpi4py import MPI

_PR_SET_PDEATHSIG = 1
_BYTES = 16 << 20
_CHUNK = 4 << 20
_MAX_SEC = 2.0
_MOUNTS = Path("/proc/mounts")


def main() -> None:
    """Make the examination that the command line names."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    result = os.dup(1)
    os.dup2(2, 1)  # vendors' libraries print to stdout
    name, arguments = sys.argv[1:]
    facts = _EXAMINATIONS[name](**json.loads(arguments))
    with open(result, "w") as file:
        json.dump(facts, file)
    sys.stdout.flush()
    os._exit(0)  # a vendor's library may hang where it is unloaded


def _examine_devices(**arguments: Any) -> dict[str, Any]:
    from kaitian_mpi.preflight.device_probe import examine_devices

    return asdict(examine_devices(**arguments))


def _examine_storage(**arguments: Any) -> dict[str, Any]:
    return asdict(examine_storage(**arguments))


def _examine_mpi() -> dict[str, Any]:
    from kaitian_mpi.preflight.collect import collect_mpi

    return asdict(collect_mpi(_start_mpi()))


def _count_ranks() -> dict[str, Any]:
    size = _start_mpi().size
    from mpi4py import MPI

    MPI.Finalize()
    return {"size": size}


def _start_mpi() -> MPI.Intracomm:
    """Start MPI as training does, which may choose other transports than MPI by itself."""
    from kaitian_mpi.errors import UserError
    from kaitian_mpi.runtime.launcher import read_tasks, unlaunched
    from kaitian_mpi.runtime.lifecycle import initialize_mpi

    try:
        return initialize_mpi()
    except UserError as error:
        # Its ranks do not see each other, or it examines a machine of a larger allocation alone.
        if is_mpi_running() and (read_tasks(os.environ) or unlaunched(os.environ)):
            from mpi4py import MPI

            return MPI.COMM_WORLD
        sys.exit(str(error))


def examine_storage(run_dir: str) -> Storage:
    """Write to the file system of a run folder, and leave nothing there.

    Args:
        run_dir: the folder; it need not exist.
    """
    folder = nearest_folder(Path(run_dir).expanduser().absolute())
    speed, error = None, ""
    try:
        if not folder.is_dir():
            raise NotADirectoryError(0, "not a directory")
        speed = time_writing(folder)
    except OSError as failure:
        error = failure.strerror or str(failure)
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        free = 0
    return Storage(
        folder=str(folder),
        file_system=file_system(folder, _mounts()),
        free_bytes=free,
        write_mb_per_sec=speed,
        error=error,
    )


def _mounts() -> str:
    try:
        return _MOUNTS.read_text()
    except OSError:  # as on macOS
        return ""


def nearest_folder(path: Path) -> Path:
    """Return the path, or else the nearest above it that exists."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def time_writing(folder: Path) -> float:
    """Return the speed of writing 16 MiB to disk, in 10^6 bytes a second; at most for 2 s.

    Raises:
        OSError: nothing can be written.
    """
    chunk = os.urandom(_CHUNK)  # a file system may compress
    written, began = 0, time.perf_counter()
    # It has no name, or loses it at once: nothing stays if this process is killed.
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        while written < _BYTES and time.perf_counter() - began < _MAX_SEC:
            written += file.write(chunk)
            os.fsync(file.fileno())
    return written / (time.perf_counter() - began) / 1e6


def file_system(folder: Path, mounts: str) -> str:
    """Return the type and the place of a folder's file system, such as `ext4 on /`.

    Args:
        folder: the folder.
        mounts: what /proc/mounts says.
    """
    real, found = os.path.realpath(folder), ("", "unknown")
    for line in mounts.splitlines():
        _, place, kind, *_ = line.split(" ")
        place = place.encode().decode("unicode_escape")  # a space is \040
        inside = real == place or real.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(found[0]):
            found = place, kind
    return f"{found[1]} on {found[0]}" if found[0] else found[1]


_EXAMINATIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "devices": _examine_devices,
    "run folder": _examine_storage,
    "mpi": _examine_mpi,
    "count": _count_ranks,
}

if __name__ == "__main__":
    main()
