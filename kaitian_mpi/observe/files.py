"""Atomic file writing, and JSON files."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight.verdict import size_text

_TAIL_BYTES = 1 << 20


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = False, shared: bool = False) -> Iterator[IO[bytes]]:
    """Write a temporary file that replaces `path` when the block ends without an error.

    `sync` waits until content and name are on disk; `shared` allows several processes to write it.

    Raises:
        OSError: the file cannot be written, e.g. to a full disk; `path` is unchanged.
    """
    suffix = f".{os.getpid()}.partial" if shared else ".partial"
    partial = path.with_name(f"{path.name}{suffix}")
    try:
        with partial.open("wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def append(path: Path, content: bytes) -> None:
    """Append to a file; after an error, the file has its previous length again.

    Raises:
        OSError: the file cannot be written, e.g. to a full disk.
    """
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(content)
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, before)
        raise


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def describe_failure(error: OSError, folder: Path, needed: int) -> str:
    """Return the reason why `needed` bytes could not be written to a folder."""
    reason = error.strerror or str(error)
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return reason
    return f"{reason} ({size_text(needed)} needed, {size_text(free)} free)"


def read_last_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects in the last lines of a file, oldest first, without the damaged ones.

    Those are the lines in its last MiB; none if the file is missing or unreadable.
    """
    lines = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        for text in file.read().split(b"\n")[:-1]:  # the last line may not be whole yet
            with contextlib.suppress(ValueError, RecursionError):
                lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if the file is missing or invalid."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def finite(content: Any) -> Any:
    """Replace numbers that are not finite, which JSON cannot hold, by None."""
    if isinstance(content, Mapping):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def json_bytes(content: Any, *, allow_nan: bool = True) -> bytes:
    """Serialize a value as a JSON file's content.

    Raises:
        ValueError: a number is not finite, and that is not allowed.
    """
    return (json.dumps(content, indent=2, allow_nan=allow_nan) + "\n").encode()


def write_output(path: Path, content: bytes, advice: str) -> None:
    """Write a file named on the command line.

    Raises:
        UserError: the file cannot be written; `advice` says what to do.
    """
    try:
        target = path.resolve()  # keeps a symbolic link
        if path.exists() and not (path.is_file() and os.access(target.parent, os.W_OK)):
            path.write_bytes(content)  # such as /dev/stdout, or a file in another user's folder
            return
        with replacing(target, shared=True) as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); {advice}") from error
