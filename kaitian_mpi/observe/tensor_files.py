"""Reads and writes files of torch.save, without executing anything in them."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from kaitian_mpi.devices.memory_limit import unlimited

_BUFFER_BYTES = 1 << 20  # each write() releases the GIL and must acquire it again
_MIN_SPOOLED_BYTES = 1 << 16


class UnusableError(Exception):
    """A file is damaged or has other content than needed; the message is the reason."""


@dataclass(frozen=True)
class TensorFile:
    """The content of a file."""

    content: Any
    """Tensors in host memory and plain values; must not be modified."""
    is_mapped: bool = False
    """Whether the tensors' memory is the file's, mapped into this process."""


def load_tensors(file: IO[bytes]) -> Any:
    """Return the tensors and plain values in a file of torch.save.

    Raises:
        UnusableError: the file is damaged, or holds other objects.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an error follows warnings about the file's type
            return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except pickle.UnpicklingError as error:  # its message recommends loading the file unsafely
        raise UnusableError("it holds more than tensors and plain values") from error
    except Exception as error:  # torch.load raises many types for malformed files
        reason = str(error).partition("\n")[0].partition(". ")[0]  # advice follows
        raise UnusableError(f"torch.load: {type(error).__name__}: {reason}") from error


def map_tensors(path: Path) -> TensorFile:
    """Load a file as `load_tensors` does, but map the tensors instead of reading them."""
    try:
        with unlimited():
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # some file systems cannot map files; any other error is raised below
        with path.open("rb") as file:
            return TensorFile(load_tensors(file))
    return TensorFile(content, is_mapped=True)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


class Spool:
    """Host memory for large tensors, mapped from unnamed files that end with the tensors.

    Attributes:
        fault: the error of the first file that could not be created, e.g. on a full disk; the
            values of that tensor and later ones are lost. None if all are kept.
    """

    def __init__(self, folder: Path | None) -> None:
        """Keep the files in a folder; without a folder, tensors are copied in memory."""
        self._folder = folder
        self.fault: OSError | None = None

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a tensor of another one's shape, strides and dtype, without gaps."""
        if like.nbytes < _MIN_SPOOLED_BYTES or self._folder is None:
            return torch.empty_like(like, device="cpu")
        memory = self._map(self._folder, like.nbytes) if self.fault is None else None
        if memory is None:
            return torch.zeros((), dtype=like.dtype).expand(like.shape)
        return memory.view(like.dtype).as_strided(like.shape, like.stride())

    def keep(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a copy of tensors concatenated by rows; they differ only in the number of rows."""
        size = sum(tensor.nbytes for tensor in rows)
        if size < _MIN_SPOOLED_BYTES or self._folder is None:
            return torch.cat([tensor.cpu() for tensor in rows])
        shape = (sum(map(len, rows)), *rows[0].shape[1:])
        memory = self._map(self._folder, size) if self.fault is None else None
        if memory is None:
            return torch.zeros((), dtype=rows[0].dtype).expand(shape)
        whole = memory.view(rows[0].dtype).view(shape)
        for target, tensor in zip(whole.split(list(map(len, rows))), rows, strict=True):
            target.copy_(tensor)
        return whole

    def _map(self, folder: Path, size: int) -> torch.Tensor | None:
        try:
            with tempfile.NamedTemporaryFile(dir=folder) as file:
                # Without reserved space, a write to the mapped memory could end the process.
                os.posix_fallocate(file.fileno(), 0, size)
                return torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
        except OSError as error:
            self.fault = error
            return None


def write_tensors(file: IO[bytes], state: Any) -> tuple[int, str]:
    """Write a file as torch.save does, without copying tensors in host memory.

    Returns:
        The number of bytes and their SHA-256 in hex.
    """
    return write_hashed(file, lambda buffered: torch.save(state, buffered))


def write_hashed(file: IO[bytes], fill: Callable[[IO[bytes]], object]) -> tuple[int, str]:
    """Let `fill` write to a file; return the number of bytes and their SHA-256 in hex."""
    writer = _Writer(file)
    with io.BufferedWriter(writer, _BUFFER_BYTES) as buffered:
        fill(buffered)
    if writer.error is not None:
        raise writer.error
    return writer.size, writer.sha256.hexdigest()


class _Writer(io.RawIOBase):
    """Writes to a file, sequentially.

    After an error it discards all data: torch's C++ writer would turn an OSError into a
    RuntimeError.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = 0
        self.sha256 = hashlib.sha256()
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
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
