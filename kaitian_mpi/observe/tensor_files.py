"""Files of tensors that torch.save writes. Nothing in them is executed."""

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
    """A file's content is damaged or not of the kind needed; the message is the reason."""


@dataclass(frozen=True)
class TensorFile:
    """The content of a file."""

    content: Any
    """Tensors in host memory and plain values; not to be changed."""
    is_mapped: bool = False
    """Whether the tensors' memory is the file's, mapped into this process."""


def load_tensors(file: IO[bytes]) -> Any:
    """Return torch.save's tensors and plain values, or raise `UnusableError`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an error follows those about a file's kind
            return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except pickle.UnpicklingError as error:  # its message recommends loading the file unsafely
        raise UnusableError("it holds more than tensors and plain values") from error
    except Exception as error:  # torch.load raises many types for malformed files
        reason = str(error).partition("\n")[0].partition(". ")[0]  # advice follows
        raise UnusableError(f"torch.load: {type(error).__name__}: {reason}") from error


def map_tensors(path: Path) -> TensorFile:
    """Open a file as `load_tensors` does, but leave the tensors in it."""
    try:
        with unlimited():
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # some file systems map no file: what else is wrong shows below
        with path.open("rb") as file:
            return TensorFile(load_tensors(file))
    return TensorFile(content, is_mapped=True)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors in nested mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


class Spool:
    """Host memory for large tensors that is in files without a name, and ends with them.

    Attributes:
        fault: why there was no file for a tensor, e.g. because the disk is full; the values of that
            and of later ones are lost. None if all are kept.
    """

    def __init__(self, folder: Path | None) -> None:
        """Have the files in a folder; without one, tensors are copied in memory."""
        self._folder = folder
        self.fault: OSError | None = None

    def keep(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a copy of tensors one below the other: they differ in the number of rows only."""
        size = sum(each.nbytes for each in rows)
        if size < _MIN_SPOOLED_BYTES or self._folder is None:
            return torch.cat([each.cpu() for each in rows])
        shape = sum(map(len, rows)), *rows[0].shape[1:]
        memory = self._map(self._folder, size) if self.fault is None else None
        if memory is None:
            return torch.zeros((), dtype=rows[0].dtype).expand(shape)
        whole = memory.view(rows[0].dtype).view(shape)
        for target, each in zip(whole.split([*map(len, rows)]), rows, strict=True):
            target.copy_(each)
        return whole

    def _map(self, folder: Path, size: int) -> torch.Tensor | None:
        try:
            with tempfile.NamedTemporaryFile(dir=folder) as file:
                # Without the space, a write to the mapped memory would end the process.
                os.posix_fallocate(file.fileno(), 0, size)
                return torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
        except OSError as error:
            self.fault = error
            return None


def write_tensors(file: IO[bytes], state: Any) -> tuple[int, str]:
    """Write what torch.save writes, as `write_hashed`, without a copy of tensors in host memory."""
    return write_hashed(file, lambda buffered: torch.save(state, buffered))


def write_hashed(file: IO[bytes], fill: Callable[[IO[bytes]], object]) -> tuple[int, str]:
    """Write what a function writes; return the bytes' number and their SHA-256 in hex."""
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
