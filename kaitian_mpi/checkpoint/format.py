"""One checkpoint: what its two files hold, and how they are written and verified.

The .pt file is what plain `torch.load` reads, tensors and plain values alone. The .json file beside
it describes it and holds its size and SHA-256, and a checksum of itself.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch

from kaitian_mpi.errors import UserError
from kaitian_mpi.output.files import json_bytes

FORMAT_VERSION = 2  # version 1 stored all buffers as float64
_PLAIN_TYPES = (int, float, bool, str, bytes, type(None))


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and found intact."""

    path: Path
    """The .pt file."""
    about: dict[str, Any]
    """What the .json beside it holds: what `write` was given, and what it added."""
    state: dict[str, Any]
    """Its tensors are in host memory."""

    @property
    def step(self) -> int:
        """The steps that were done when it was written."""
        return self.about["step"]


class UnusableError(Exception):
    """A checkpoint is damaged; the text is the reason."""


class HashingFile(io.RawIOBase):
    """Writes to a file and hashes what it wrote.

    torch.save writes sequentially and never seeks; its writer checks that.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size, self.sha256 = 0, hashlib.sha256()
        self.error: OSError | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write data; after an error, which is kept, discard it.

        torch's C++ writer would turn an OSError raised here into a RuntimeError.
        """
        if self.error is not None:
            return len(data)
        try:
            count = os.write(self._file.fileno(), data)
        except OSError as error:
            self.error = error
            return len(data)
        self.sha256.update(data[:count])
        self.size += count
        return count


def check_loadable(value: Any, where: str) -> None:
    """Raise TypeError for a value that torch.save accepts but a safe torch.load refuses."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            check_loadable(key, f"a key of {where}")
            check_loadable(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            check_loadable(item, f"{where}[{index}]")
    elif type(value) not in _PLAIN_TYPES and not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{where}: found a {type(value).__module__}.{type(value).__qualname__}, needed "
            "tensors, numbers, strings, lists, tuples and dicts; turn it into one of these"
        )


def describe(about: dict[str, Any], size: int, sha256: str) -> bytes:
    """Return the content of the .json file of a checkpoint.

    Args:
        about: JSON values, as of `CheckpointFiles.write`.
        size: of the .pt file, in bytes.
        sha256: of the .pt file, in hex.
    """
    content = {
        **about,
        "format_version": FORMAT_VERSION,
        "bytes": size,
        "sha256": sha256,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    content = json.loads(json.dumps(content))  # keys become strings, as in the file
    return json_bytes(_seal(content))


def _seal(content: dict[str, Any]) -> dict[str, Any]:
    """Add a checksum of the description itself, which the .pt file's checksum does not cover."""
    content = {key: value for key, value in content.items() if key != "check"}
    text = json.dumps(content, sort_keys=True)
    return {**content, "check": hashlib.sha256(text.encode()).hexdigest()}


def read_description(path: Path) -> dict[str, Any]:
    """Read and verify a .json file.

    Raises:
        UnusableError: it is missing, damaged or altered.
        UserError: another version of this package wrote it.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UnusableError(f"{path.name} is missing, which is written last") from error
    except OSError as error:
        raise UnusableError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"{path.name} is not JSON") from error
    if not isinstance(content, dict):
        raise UnusableError(f"{path.name} does not describe a checkpoint")
    version = content.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise UserError(
            f"checkpoint {path.with_suffix('.pt')}: found format version {version}, needed at "
            f"most {FORMAT_VERSION}; install a newer kaitian-mpi"
        )
    if isinstance(version, int) and version < FORMAT_VERSION:
        raise UserError(
            f"checkpoint {path.with_suffix('.pt')}: found format version {version}, needed "
            f"{FORMAT_VERSION}; finish that run with the kaitian-mpi that began it"
        )
    if content != _seal(content):
        raise UnusableError(f"{path.name} was altered after it was written")
    return content


def read(path: Path) -> Checkpoint:
    """Read and verify the checkpoint of a .pt file.

    Raises:
        UnusableError: it is missing, damaged or altered.
        UserError: another version of this package wrote it.
    """
    try:
        with path.open("rb") as file:
            about = read_description(path.with_suffix(".json"))
            size = os.fstat(file.fileno()).st_size
            if size != about["bytes"]:
                raise UnusableError(f"{size:,} bytes found, {about['bytes']:,} written")
            if hashlib.file_digest(file, "sha256").hexdigest() != about["sha256"]:
                raise UnusableError("it was altered after it was written (its SHA-256 differs)")
            file.seek(0)
            return Checkpoint(path, about, _load_state(file))
    except OSError as error:
        raise UnusableError(f"it cannot be read: {error.strerror}") from error


def _load_state(file: IO[bytes]) -> dict[str, Any]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except pickle.UnpicklingError as error:  # its text advises to load the file unsafely
        raise UnusableError("it holds more than tensors and plain values") from error
    except Exception as error:  # torch.load raises many types for malformed files
        reason = str(error).partition("\n")[0]
        raise UnusableError(f"torch.load: {type(error).__name__}: {reason}") from error
