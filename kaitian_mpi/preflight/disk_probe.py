"""Examines the file system of the run folder. Runs in a process of its own: a disk may hang."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from kaitian_mpi.preflight.facts import Storage

_BYTES = 16 << 20
_CHUNK = 4 << 20
_MAX_SEC = 2.0
_MOUNTS = Path("/proc/mounts")


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
