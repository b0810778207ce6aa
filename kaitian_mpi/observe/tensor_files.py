"""Files of tensors: torch.save's and safetensors'. Nothing in them is executed."""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from kaitian_mpi.errors import UserError

SAFETENSORS = ".safetensors"
_BUFFER_BYTES = 1 << 20  # each write() releases the GIL and must acquire it again


class UnusableError(Exception):
    """A file's content is damaged or not of the kind needed; the message is the reason."""


def load_tensors(file: IO[bytes]) -> Any:
    """Return what torch.save has written, if it is tensors and plain values, in host memory.

    Raises:
        UnusableError: it holds anything else, or is damaged.
        OSError: it cannot be read.
    """
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


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


class TensorFile:
    """The content of a file, whose tensors may stay in it until they are used.

    Attributes:
        content: tensors in host memory and plain values.
        is_mapped: whether the tensors' memory is the file's, mapped into this process; then they
            are not to be changed.
    """

    def __init__(self, content: Any, is_mapped: bool = False) -> None:
        self.content, self.is_mapped = content, is_mapped
        # They stay valid as long as this object keeps the tensors.
        tensors = tensors_in(content) if is_mapped else ()
        self._mapped = frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def release(self, tensor: torch.Tensor) -> None:
        """Free the memory of a contiguous part of one of the tensors, whose values were read.

        The values can be read again. Does nothing if the memory is not the file's.
        """
        if tensor.nbytes and tensor.untyped_storage().data_ptr() in self._mapped:
            begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            length = tensor.data_ptr() + tensor.nbytes - begin
            ctypes.CDLL(None).madvise(
                *(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
            )


def map_tensors(path: Path) -> TensorFile:
    """Open what torch.save has written, as `load_tensors` does, but leave the tensors in the file.

    Raises:
        UnusableError: it holds anything but tensors and plain values, or is damaged.
        OSError: it cannot be read.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # some file systems map no file: what else is wrong shows below
        with path.open("rb") as file:
            return TensorFile(load_tensors(file))
    return TensorFile(content, is_mapped=True)


class TensorWriter(io.RawIOBase):
    """Writes to a file for torch.save, which writes sequentially and never seeks.

    Attributes:
        size: the bytes written.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._error: OSError | None = None
        self.size = 0

    def save(self, state: Any) -> None:
        """Write what torch.save writes, without a copy of tensors in host memory.

        Raises:
            OSError: the file cannot be written.
        """
        self.fill(lambda buffered: torch.save(state, buffered))

    def fill(self, fill: Callable[[IO[bytes]], object]) -> None:
        """Write what a function writes; then this is closed.

        Raises:
            OSError: the file cannot be written.
        """
        with io.BufferedWriter(self, _BUFFER_BYTES) as buffered:
            fill(buffered)
        if self._error is not None:
            raise self._error

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write data; after an error, which `fill` raises, discard it.

        torch's C++ writer would turn an OSError raised here into a RuntimeError.
        """
        if self._error is not None:
            return len(data)
        try:
            count = os.write(self._file.fileno(), data)
        except OSError as error:
            self._error = error
            return len(data)
        self.written(data[:count])
        self.size += count
        return count

    def written(self, data: Any) -> None:
        """Take note of data that is written; does nothing here."""


def load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a .safetensors file by name, in host memory.

    Raises:
        UnusableError: the file is damaged.
        OSError: it cannot be read.
        UserError: the package safetensors is not installed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        reason = str(error).partition("\n")[0]
        raise UnusableError(f"safetensors: {reason}") from error


def check_safetensors(flag: str, path: str) -> None:
    """Check that the package safetensors is installed.

    Args:
        flag: the command-line flag, for the error message.
        path: the flag's file.

    Raises:
        UserError: it is not.
    """
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"{flag} {path}: the package safetensors is not installed; "
            "pip install 'kaitian-mpi[export]'"
        ) from error
