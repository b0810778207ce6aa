"""CIFAR-10 (Krizhevsky, 2009, "Learning Multiple Layers of Features from Tiny Images")."""

from __future__ import annotations

import os
import pickletools
from pathlib import Path

import numpy as np
import torch

from kaitian_mpi.recipes.datasets.images import ImageArrays, OfficialFiles

FILES = OfficialFiles("cifar10", "https://www.cs.toronto.edu/~kriz/cifar.html")

_PIXELS = 3072
_RECORD = 1 + _PIXELS
# Over the 50,000 training images.
_MEAN = (0.4914, 0.4822, 0.4465)
_STD = (0.2470, 0.2435, 0.2616)
_FOLDERS = "", "cifar-10-batches-bin", "cifar-10-batches-py"
_WHOLE_NUMBERS = {"BININT", "BININT1", "BININT2"}  # opcodes of a pickle
_TRUTHS = {"NEWTRUE": True, "NEWFALSE": False}


def load(data_dir: str) -> tuple[ImageArrays, ImageArrays]:
    """Read the training and test images, 3x32x32, from the official files.

    Reads the binary or the Python version, from `data_dir` or from the folder that the archive
    unpacks to.
    """
    base = FILES.folder(data_dir)
    for folder in (base / name for name in _FOLDERS):
        for suffix in (".bin", ""):
            if os.path.exists(folder / f"data_batch_1{suffix}"):
                train = [folder / f"data_batch_{number}{suffix}" for number in range(1, 6)]
                return _read(train), _read([folder / f"test_batch{suffix}"])
    raise FILES.error(base, "neither data_batch_1.bin nor data_batch_1 is there")


def _read(paths: list[Path]) -> ImageArrays:
    images, labels = [], []
    for path in paths:
        read = _read_binary if path.suffix else _read_pickle
        pixels, classes = read(path)
        FILES.check_labels(path, classes, len(pixels))
        images.append(pixels.view(-1, 3, 32, 32))
        labels.append(classes)
    return ImageArrays(torch.cat(images), torch.cat(labels), _MEAN, _STD)


def _read_binary(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Read records of one label byte followed by the red, green and blue planes."""
    content = FILES.read(path)
    if not content or len(content) % _RECORD:
        problem = f"{len(content):,} bytes are no whole number of records of {_RECORD:,} bytes"
        raise FILES.error(path, problem)
    records = torch.from_numpy(np.frombuffer(content, np.uint8).copy()).view(-1, _RECORD)
    return records[:, 1:].reshape(-1, _PIXELS), records[:, 0].long()


def _read_pickle(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a pickled dict with `data`, a uint8 numpy array [n, 3072], and `labels`, n ints.

    A pickle is a program. Here it is not run: its opcodes are searched for the list of labels, and
    for the array's bytes with what says whether they are in columns.
    """
    content = FILES.read(path)
    pixels, labels, is_labels, is_by_column, in_columns = b"", [], False, False, False
    try:
        for opcode, value, _ in pickletools.genops(content):
            is_by_column = _TRUTHS.get(opcode.name, is_by_column)
            if isinstance(value, str | bytes):
                is_labels = value in ("labels", b"labels")
                if len(value) > len(pixels):
                    pixels = value.encode("latin1") if isinstance(value, str) else value
                    in_columns = is_by_column
            elif is_labels and opcode.name in _WHOLE_NUMBERS:
                labels.append(value)
    except Exception as error:  # a damaged pickle can raise anything
        problem = " ".join(str(error)[:120].split())
        raise FILES.error(path, f"it is no valid pickle ({problem})") from error
    if not labels or len(pixels) % _PIXELS:
        raise FILES.error(path, "it is no CIFAR-10 batch")
    rows = np.frombuffer(pixels, np.uint8)
    rows = rows.reshape((-1, _PIXELS), order="F" if in_columns else "C")
    return torch.from_numpy(rows.copy(order="C")), torch.tensor(labels)
