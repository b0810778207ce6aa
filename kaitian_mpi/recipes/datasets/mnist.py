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

from kaitian_mpi.recipes.datasets.images import ImageArrays, OfficialFiles

FILES = OfficialFiles("mnist", "http://yann.lecun.com/exdb/mnist/")

_SIDE = 28
# Over the 60,000 training images, after padding.
_MEAN = (0.1000,) * 3
_STD = (0.2752,) * 3


def load(data_dir: str) -> tuple[ImageArrays, ImageArrays]:
    """Read the training and test images, 3x32x32, from the official idx files.

    The files may be compressed (.gz) or not. The 28x28 images are padded with zeros to 32x32 and
    get three equal channels.
    """
    folder = FILES.folder(data_dir)
    return _read_part(folder, "train"), _read_part(folder, "t10k")


def _read_part(folder: Path, part: str) -> ImageArrays:
    images_path = _path(folder / f"{part}-images-idx3-ubyte")
    labels_path = _path(folder / f"{part}-labels-idx1-ubyte")
    images = _read_idx(images_path, (_SIDE, _SIDE))
    labels = _read_idx(labels_path, ()).long()
    FILES.check_labels(labels_path, labels, len(images))
    return ImageArrays(functional.pad(images, (2, 2, 2, 2)).unsqueeze(1), labels, _MEAN, _STD)


def _path(plain: Path) -> Path:
    return plain if os.path.exists(plain) else Path(f"{plain}.gz")


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
            raise FILES.error(path, f"the gzip file is damaged ({error})") from error
    words = 2 + len(item_shape)
    header = np.frombuffer(content[: 4 * words].ljust(4 * words, b"\0"), ">u4").tolist()
    magic, count, *shape = header
    expected = 4 * words + count * math.prod(item_shape)
    if magic != 0x0800 + words - 1 or tuple(shape) != item_shape:
        raise FILES.error(path, "it is no idx file of such data")
    if count == 0 or len(content) != expected:
        raise FILES.error(path, f"it has {len(content):,} bytes; {count:,} items take {expected:,}")
    values = np.frombuffer(content, np.uint8, offset=4 * words).copy()
    return torch.from_numpy(values).view(count, *item_shape)
