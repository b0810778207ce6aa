"""MNIST, handwritten digits.

LeCun, Bottou, Bengio and Haffner, 1998, "Gradient-based learning applied to document recognition".
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from kaitian_mpi.recipes.datasets.arrays import ImageArrays, hold_out_last
from kaitian_mpi.recipes.datasets.official_files import OfficialFiles

FILES = OfficialFiles("mnist", "http://yann.lecun.com/exdb/mnist/", num_classes=10)

_SIDE = 28
_OFFICIAL_COUNTS = {"train": 60_000, "t10k": 10_000}
# Over the 60,000 training images, after padding.
_MEAN = (0.1000,) * 3
_STD = (0.2752,) * 3


def load(data_dir: str, val_split: float) -> tuple[ImageArrays, ImageArrays]:
    """Read the training and validation images, 3x32x32, from the official idx files.

    The files may be compressed (.gz) or not. The 28x28 images are padded with zeros to 32x32 and
    get three equal channels. The test set is used for validation; if its files are missing, the
    last `val_split` of the training set is.

    Raises:
        UserError: a file is missing, damaged or not an MNIST file.
    """
    folder = FILES.folder(data_dir)
    train = _read_part(folder, "train")
    if not any(os.path.exists(path) for path in _paths(folder, "t10k")):
        return hold_out_last(train, val_split)
    return train, _read_part(folder, "t10k")


def _paths(folder: Path, part: str) -> list[Path]:
    """Return the paths of the images and the labels."""
    plain = [folder / f"{part}-images-idx3-ubyte", folder / f"{part}-labels-idx1-ubyte"]
    return [path if os.path.exists(path) else Path(f"{path}.gz") for path in plain]


def _read_part(folder: Path, part: str) -> ImageArrays:
    images_path, labels_path = _paths(folder, part)
    images = _read_idx(images_path, (_SIDE, _SIDE))
    labels = _read_idx(labels_path, ()).long()
    if len(images) != len(labels):
        raise FILES.file_error(labels_path, f"it has {len(labels)} labels for {len(images)} images")
    FILES.check_labels(labels_path, labels)
    FILES.warn_if_incomplete(part, len(images), _OFFICIAL_COUNTS[part])
    padded = functional.pad(images, (2, 2, 2, 2)).unsqueeze(1)
    return ImageArrays(padded.expand(-1, 3, -1, -1), labels, _MEAN, _STD)


def _read_idx(path: Path, item_shape: tuple[int, ...]) -> torch.Tensor:
    """Read an idx file of unsigned bytes, [n, *item_shape].

    The header is big-endian four-byte words: a magic number (0x08 for unsigned bytes, and the
    number of dimensions), then the dimensions.
    """
    content = FILES.read(path)
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise FILES.file_error(path, f"the gzip file is damaged ({error})") from error
    dimensions = 1 + len(item_shape)
    header_bytes = 4 * (1 + dimensions)
    if len(content) < header_bytes:
        raise FILES.file_error(path, f"{len(content)} bytes are too few for an idx file")
    magic, count, *shape = np.frombuffer(content[:header_bytes], ">u4").tolist()
    if magic != 0x0800 + dimensions:
        raise FILES.file_error(path, f"its magic number is {magic}, not {0x0800 + dimensions}")
    if tuple(shape) != item_shape:
        raise FILES.file_error(path, f"its images are {shape}, not {list(item_shape)}")
    expected = header_bytes + count * math.prod(item_shape)
    if count == 0 or len(content) != expected:
        raise FILES.file_error(
            path, f"it has {len(content):,} bytes; {count:,} items take {expected:,}"
        )
    values = np.frombuffer(content, np.uint8, offset=header_bytes).copy()
    return torch.from_numpy(values).view(count, *item_shape)
