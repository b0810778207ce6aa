"""CIFAR-10 (Krizhevsky, 2009, "Learning Multiple Layers of Features from Tiny Images")."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from kaitian_mpi.recipes.datasets.arrays import ImageArrays
from kaitian_mpi.recipes.datasets.cifar10_pickle import parse_batch
from kaitian_mpi.recipes.datasets.holdout import hold_out_last
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
        "no data_batch_1.bin and no data_batch_1",
        "the official files of the binary or the Python version, here or in "
        "cifar-10-batches-bin or cifar-10-batches-py",
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
            f"{len(content):,} bytes",
            f"whole records of {_RECORD:,} bytes, {_OFFICIAL_RECORDS * _RECORD:,} in the official "
            "file",
        )
    records = torch.from_numpy(np.frombuffer(content, np.uint8).copy()).view(-1, _RECORD)
    return records[:, 1:], records[:, 0].long()


def _read_pickle(path: Path) -> _Batch:
    try:
        return parse_batch(FILES.read(path), _PIXELS)
    except ValueError as error:
        needed = f"a CIFAR-10 batch, a pickled dict of 'data', uint8 [n, {_PIXELS}], and 'labels'"
        raise FILES.file_error(path, str(error), needed) from error
