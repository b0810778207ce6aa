"""CIFAR-10 (Krizhevsky, 2009, "Learning Multiple Layers of Features from Tiny Images").

Its Python version is read without executing anything in the pickle, which is a program. Even the
few numpy functions that an array's pickle calls can be abused: a forged `numpy.dtype` state makes
numpy treat raw bytes as object pointers. So each allowed name is replaced by an object that only
records its arguments, and the array is built from the recorded bytes, after checks.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kaitian_mpi.recipes.datasets.arrays import ImageArrays, hold_out_last
from kaitian_mpi.recipes.datasets.official_files import OfficialFiles

FILES = OfficialFiles("cifar10", "https://www.cs.toronto.edu/~kriz/cifar.html", num_classes=10)

_SHAPE = (3, 32, 32)
_PIXELS = 3072
_RECORD = 1 + _PIXELS
_OFFICIAL_RECORDS = 10_000
# Over the 50,000 training images.
_MEAN = (0.4914, 0.4822, 0.4465)
_STD = (0.2470, 0.2435, 0.2616)


def load(data_dir: str, val_split: float) -> tuple[ImageArrays, ImageArrays]:
    """Read the training and validation images, 3x32x32, from the official files.

    Reads the binary or the Python version, from `data_dir` or from the folder that the archive
    unpacks to. The test set is used for validation; if its file is missing, the last `val_split`
    of the training set is (0.2 is exactly `data_batch_5`).

    Raises:
        UserError: a file is missing, damaged or not a CIFAR-10 file.
    """
    folder, suffix = _locate(FILES.folder(data_dir))
    read = _read_binary if suffix else _read_pickle
    train = _join(read, [folder / f"data_batch_{number}{suffix}" for number in range(1, 6)])
    FILES.warn_if_incomplete("training", len(train), 5 * _OFFICIAL_RECORDS)
    test_path = folder / f"test_batch{suffix}"
    if not os.path.exists(test_path):
        return hold_out_last(train, val_split)
    test = _join(read, [test_path])
    FILES.warn_if_incomplete("test", len(test), _OFFICIAL_RECORDS)
    return train, test


def _locate(folder: Path) -> tuple[Path, str]:
    """Return the folder of the batch files and their suffix; any one batch identifies it."""
    candidates = [
        (folder, ".bin"),
        (folder / "cifar-10-batches-bin", ".bin"),
        (folder, ""),
        (folder / "cifar-10-batches-py", ""),
    ]
    for candidate, suffix in candidates:
        if any(os.path.exists(candidate / f"data_batch_{n}{suffix}") for n in range(1, 6)):
            return candidate, suffix
    raise FILES.file_error(
        folder,
        "neither data_batch_1.bin nor data_batch_1 is there, nor in cifar-10-batches-bin or "
        "cifar-10-batches-py",
    )


_Batch = tuple[torch.Tensor, torch.Tensor]


def _join(read: Callable[[Path], _Batch], paths: list[Path]) -> ImageArrays:
    batches = [read(path) for path in paths]
    for path, (_, labels) in zip(paths, batches, strict=True):
        FILES.check_labels(path, labels)
    images = torch.cat([pixels for pixels, _ in batches]).view(-1, *_SHAPE)
    return ImageArrays(images, torch.cat([labels for _, labels in batches]), _MEAN, _STD)


def _read_binary(path: Path) -> _Batch:
    """Read records of one label byte followed by the red, green and blue planes."""
    content = FILES.read(path)
    if not content or len(content) % _RECORD:
        raise FILES.file_error(
            path,
            f"{len(content):,} bytes are no whole number of records of {_RECORD:,} bytes (the "
            f"official file has {_OFFICIAL_RECORDS * _RECORD:,})",
        )
    records = torch.from_numpy(np.frombuffer(content, np.uint8).copy()).view(-1, _RECORD)
    return records[:, 1:], records[:, 0].long()


def _read_pickle(path: Path) -> _Batch:
    """Read a pickled dict with `data`, a uint8 numpy array [n, 3072], and `labels`, n ints."""
    content = FILES.read(path)
    try:
        batch = _InertUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise FILES.file_error(path, f"it is no valid pickle ({str(error)[:120]})") from error
    try:
        return _parse(batch)
    except ValueError as error:
        raise FILES.file_error(path, f"{error}, so it is no CIFAR-10 batch") from error


def _parse(batch: Any) -> _Batch:
    if not isinstance(batch, dict):
        raise ValueError(f"it holds a {type(batch).__name__}")
    pixels = _rows(batch.get(b"data", batch.get("data")))
    labels = batch.get(b"labels", batch.get("labels"))
    if not isinstance(labels, list) or not all(map(_is_small, labels)):
        raise ValueError("its 'labels' are no list of class numbers")
    if len(labels) != len(pixels):
        raise ValueError(f"it has {len(labels)} labels for {len(pixels)} images")
    return pixels, torch.tensor(labels)


def _is_small(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**31


def _rows(array: Any) -> torch.Tensor:
    """Build a uint8 tensor [n, 3072] from a recorded numpy array."""
    try:
        _, (count, length), dtype, by_column, raw = array.state
        is_bytes = dtype.args[0] in ("u1", b"u1") and isinstance(raw, bytes)
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise ValueError("its 'data' is no numpy array of two dimensions") from error
    if not (is_bytes and _is_small(count) and _is_small(length)):
        raise ValueError("its 'data' is no uint8 array of two dimensions")
    if count < 1 or length != _PIXELS or count * length != len(raw):
        raise ValueError(f"its 'data' is {len(raw)} bytes for an array of {count} x {length}")
    rows = np.frombuffer(raw, np.uint8).reshape((count, length), order="F" if by_column else "C")
    return torch.from_numpy(rows.copy(order="C"))


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
