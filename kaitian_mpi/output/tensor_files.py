"""Reads files of tensors: torch.save's and safetensors'. Nothing in them is executed."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import IO, Any

import torch

from kaitian_mpi.errors import UserError

SAFETENSORS = ".safetensors"


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
            f"{flag} {path}: found no package safetensors, needed it for such a file; install the "
            "extra: pip install 'kaitian-mpi[export]'"
        ) from error
