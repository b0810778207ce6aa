"""Files of tensors that torch.save writes. Nothing in them is executed."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from kaitian_mpi.devices.memory_limit import unlimited

_BUFFER_BYTES = 1 << 20  # each write() releases the GIL and must acquire it again


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
        self.size, self.sha256 = 0, hashlib.sha256()
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
