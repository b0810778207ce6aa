"""The two files of a checkpoint: their content and its verification.

The .pt file holds only tensors and plain values, for plain `torch.load`. The .json file beside it
describes it, with its size and SHA-256, and has a checksum of its own content.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.files import json_bytes
from kaitian_mpi.observe.tensor_files import TensorFile, TensorWriter, UnusableError, map_tensors

FORMAT_VERSION = 4


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    """The .pt file."""
    description: dict[str, Any]
    """The content of its .json file: the values given to `write`, and those that it added."""
    file: TensorFile
    """Holds the state."""

    @property
    def state(self) -> dict[str, Any]:
        """The state, with tensors in host memory or in the file; not to be changed."""
        return self.file.content

    @property
    def step(self) -> int:
        """The number of steps done when it was written."""
        return self.description["step"]


class HashingWriter(TensorWriter):
    """Writes to a file, and hashes the bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.sha256 = hashlib.sha256()

    def written(self, data: Any) -> None:
        """Hash it."""
        self.sha256.update(data)


def describe(description: dict[str, Any], size: int, sha256: str) -> bytes:
    """Return the content of the .json file, for a .pt file of this size in bytes and SHA-256."""
    content = {
        **description,
        "format_version": FORMAT_VERSION,
        "bytes": size,
        "sha256": sha256,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    content = json.loads(json.dumps(content))  # keys become strings, as in the file
    return json_bytes(_seal(content))


def _seal(content: dict[str, Any]) -> dict[str, Any]:
    """Add a checksum of the description itself."""
    content = {key: value for key, value in content.items() if key != "check"}
    text = json.dumps(content, sort_keys=True)
    return {**content, "check": hashlib.sha256(text.encode()).hexdigest()}


def read_description(path: Path) -> dict[str, Any]:
    """Read and verify a .json file.

    Raises:
        UnusableError: it is missing, damaged or altered.
        UserError: it has another format.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UnusableError(f"{path.name}, which is written last, is missing") from error
    except OSError as error:
        raise UnusableError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"{path.name} is not JSON") from error
    if not isinstance(content, dict):
        raise UnusableError(f"{path.name} does not describe a checkpoint")
    version = content.get("format_version")
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise UserError(
            f"checkpoint {path.with_suffix('.pt')} has format version {version}; this kaitian-mpi "
            f"reads version {FORMAT_VERSION}: continue the run with the release that started it"
        )
    if content != _seal(content):
        raise UnusableError(f"{path.name} was altered after it was written")
    return content


def read(path: Path) -> Checkpoint:
    """Read and verify the checkpoint of a .pt file.

    Raises:
        UnusableError: it is missing, damaged or altered.
        UserError: it has another format.
    """
    try:
        with path.open("rb") as file:
            description = read_description(path.with_suffix(".json"))
            size = os.fstat(file.fileno()).st_size
            if size != description["bytes"]:
                raise UnusableError(f"it has {size:,} of {description['bytes']:,} bytes")
            if hashlib.file_digest(file, "sha256").hexdigest() != description["sha256"]:
                raise UnusableError("it was altered after it was written (its SHA-256 differs)")
        return Checkpoint(path, description, map_tensors(path))
    except OSError as error:
        raise UnusableError(f"it cannot be read: {error.strerror}") from error
