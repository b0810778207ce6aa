"""Reads CIFAR-10's Python version without executing anything in the pickle.

A pickle is a program. Even the few numpy functions that an array's pickle calls can be abused: a
forged `numpy.dtype` state makes numpy treat raw bytes as object pointers. So none of them is
called. Each allowed name is replaced by an object that only records its arguments, and the array
is built here from the recorded bytes, after checks.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_RECORDED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


@dataclass
class _Recorded:
    """A record of a name that the pickle imports, or of a call to it."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = field(default=None, init=False)

    def __call__(self, *args: Any) -> _Recorded:
        return _Recorded(self.name, args)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Latin1:
    """Replaces `_codecs.encode`, which Python 3 uses for bytes in pickle protocol 2."""

    # Without attributes, a pickle cannot modify it.
    __slots__ = ()

    def __call__(self, text: str, encoding: str) -> bytes:
        return text.encode("latin1")


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDED:
            return _Recorded(name)
        if (module, name) == ("_codecs", "encode"):
            return _Latin1()
        # A malicious name may be long or contain line breaks.
        requested = ascii(f"{module}.{name}"[:80])
        raise pickle.UnpicklingError(f"it imports {requested}, which no CIFAR-10 file needs")


def parse_batch(content: bytes, row_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and labels of one file of CIFAR-10's Python version.

    Args:
        content: a pickled dict with `data`, a uint8 numpy array [n, row_length], and `labels`, a
            list of n ints.
        row_length: bytes per image.

    Returns:
        uint8 [n, row_length] and int64 [n].

    Raises:
        ValueError: the content is anything else. None of it has been executed.
    """
    try:
        batch = _InertUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"an invalid pickle ({str(error)[:120]})") from error
    if not isinstance(batch, dict):
        raise ValueError(f"a pickled {type(batch).__name__}")
    pixels = _rows(batch.get(b"data", batch.get("data")), row_length)
    labels = batch.get(b"labels", batch.get("labels"))
    if not isinstance(labels, list) or not all(map(_is_small, labels)):
        raise ValueError("no list of class numbers under 'labels'")
    if len(labels) != len(pixels):
        raise ValueError(f"{len(pixels)} images with {len(labels)} labels")
    return pixels, torch.tensor(labels)


def _is_small(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**31


def _rows(array: Any, row_length: int) -> torch.Tensor:
    """Build a uint8 tensor [n, row_length] from a recorded numpy array."""
    try:
        _, (count, length), dtype, by_column, raw = array.state
        is_bytes = dtype.args[0] in ("u1", b"u1") and isinstance(raw, bytes)
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise ValueError("no numpy array of two dimensions under 'data'") from error
    if not (is_bytes and _is_small(count) and _is_small(length)):
        raise ValueError("no uint8 array of two dimensions under 'data'")
    if count < 1 or length != row_length or count * length != len(raw):
        raise ValueError(f"{len(raw)} bytes for an array of {count} x {length} under 'data'")
    rows = np.frombuffer(raw, np.uint8).reshape((count, length), order="F" if by_column else "C")
    return torch.from_numpy(rows.copy(order="C"))
