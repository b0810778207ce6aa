"""The datasets whose official files users download: CIFAR-10 and MNIST."""

from __future__ import annotations

import gzip
import math
import os
import pickletools
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.images import ImageArrays

_PIXELS = 3072  # of a CIFAR-10 image
_RECORD = 1 + _PIXELS
_FOLDERS = "", "cifar-10-batches-bin", "cifar-10-batches-py"
_WHOLE_NUMBERS = {"BININT", "BININT1", "BININT2"}  # opcodes of a pickle
_TRUTHS = {"NEWTRUE": True, "NEWFALSE": False}
# Over the 50,000 training images.
_CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
_CIFAR10_STD = (0.2470, 0.2435, 0.2616)
_SIDE = 28  # of an MNIST image
# Over the 60,000 training images, after padding.
_MNIST_MEAN = (0.1000,) * 3
_MNIST_STD = (0.2752,) * 3


@dataclass(frozen=True)
class OfficialFiles:
    """A dataset of ten classes that users download, and the errors about its files."""

    name: str
    """The value of `--dataset`."""
    url: str

    def folder(self, data_dir: str) -> Path:
        """Return the folder given by `--data-dir`."""
        if not data_dir:
            raise UserError(
                f"--dataset {self.name} requires --data-dir, the folder with its official files; "
                f"download them from {self.url}"
            )
        return Path(data_dir).expanduser()

    def read(self, path: Path) -> bytes:
        """Return a file's contents."""
        try:
            return path.read_bytes()
        except OSError as error:
            raise self.error(path, f"cannot be read ({error.strerror})") from error

    def error(self, path: Path, problem: str) -> UserError:
        """Return the error to raise for a file."""
        return UserError(f"{path}: {problem}; get it from {self.url}")

    def check_labels(self, path: Path, labels: torch.Tensor, images: int) -> None:
        """Check a file's class labels, int64 [n]."""
        if len(labels) != images:
            raise self.error(path, f"it has {len(labels)} labels for {images} images")
        wrong = ((labels < 0) | (labels >= 10)).nonzero()
        if len(wrong):
            sample = int(wrong[0])
            problem = f"sample {sample} has label {labels[sample]}, which is not between 0 and 9"
            raise self.error(path, problem)


CIFAR10 = OfficialFiles("cifar10", "https://www.cs.toronto.edu/~kriz/cifar.html")
MNIST = OfficialFiles("mnist", "http://yann.lecun.com/exdb/mnist/")


def load_cifar10(data_dir: str) -> tuple[ImageArrays, ImageArrays]:
    """Read the training and test images, 3x32x32, from the official files.

    Reads the binary or the Python version, from `data_dir` or from the folder that the archive
    unpacks to.
    """
    base = CIFAR10.folder(data_dir)
    for folder in (base / name for name in _FOLDERS):
        for suffix in (".bin", ""):
            if os.path.exists(folder / f"data_batch_1{suffix}"):
                train = [folder / f"data_batch_{number}{suffix}" for number in range(1, 6)]
                return _read_cifar10(train), _read_cifar10([folder / f"test_batch{suffix}"])
    raise CIFAR10.error(base, "neither data_batch_1.bin nor data_batch_1 is there")


def _read_cifar10(paths: list[Path]) -> ImageArrays:
    images, labels = [], []
    for path in paths:
        read = _read_binary if path.suffix else _read_pickle
        pixels, classes = read(path)
        CIFAR10.check_labels(path, classes, len(pixels))
        images.append(pixels.view(-1, 3, 32, 32))
        labels.append(classes)
    return ImageArrays(torch.cat(images), torch.cat(labels), _CIFAR10_MEAN, _CIFAR10_STD)


def _read_binary(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Read records of one label byte followed by the red, green and blue planes."""
    content = CIFAR10.read(path)
    if not content or len(content) % _RECORD:
        problem = f"its {len(content):,} bytes are not one or more records of {_RECORD:,} bytes"
        raise CIFAR10.error(path, problem)
    records = torch.from_numpy(np.frombuffer(content, np.uint8).copy()).view(-1, _RECORD)
    return records[:, 1:].reshape(-1, _PIXELS), records[:, 0].long()


def _read_pickle(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a pickled dict with `data`, a uint8 numpy array [n, 3072], and `labels`, n ints.

    A pickle is a program. Here it is not run: its opcodes are searched for the list of labels, and
    for the array's bytes with what says whether they are in columns.
    """
    content = CIFAR10.read(path)
    pixels = b""
    labels = []
    is_labels = False
    is_by_column = False
    in_columns = False
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
        raise CIFAR10.error(path, f"it is not a valid pickle ({problem})") from error
    if not labels or len(pixels) % _PIXELS:
        raise CIFAR10.error(path, "it is not a CIFAR-10 batch")
    rows = np.frombuffer(pixels, np.uint8)
    rows = rows.reshape((-1, _PIXELS), order="F" if in_columns else "C")
    return torch.from_numpy(rows.copy(order="C")), torch.tensor(labels)


def load_mnist(data_dir: str) -> tuple[ImageArrays, ImageArrays]:
    """Read the training and test images, 3x32x32, from the official idx files.

    The files may be compressed (.gz) or not. The 28x28 images are padded with zeros to 32x32 and
    get three equal channels.
    """
    folder = MNIST.folder(data_dir)
    return _read_mnist(folder, "train"), _read_mnist(folder, "t10k")


def _read_mnist(folder: Path, part: str) -> ImageArrays:
    paths = [folder / f"{part}-{name}-ubyte" for name in ("images-idx3", "labels-idx1")]
    images_path, labels_path = (
        path if os.path.exists(path) else Path(f"{path}.gz") for path in paths
    )
    images = _read_idx(images_path, (_SIDE, _SIDE))
    labels = _read_idx(labels_path, ()).long()
    MNIST.check_labels(labels_path, labels, len(images))
    return ImageArrays(
        functional.pad(images, (2, 2, 2, 2)).unsqueeze(1), labels, _MNIST_MEAN, _MNIST_STD
    )


def _read_idx(path: Path, item_shape: tuple[int, ...]) -> torch.Tensor:
    """Read an idx file of unsigned bytes, [n, *item_shape].

    The header is big-endian four-byte words: a magic number (0x08 for unsigned bytes, and the
    number of dimensions), then the dimensions.
    """
    content = MNIST.read(path)
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise MNIST.error(path, f"the gzip file is damaged ({error})") from error
    words = 2 + len(item_shape)
    header = content[: 4 * words].ljust(4 * words, b"\0")
    magic, count, *shape = np.frombuffer(header, ">u4").tolist()
    expected = 4 * words + count * math.prod(item_shape)
    if magic != 0x0800 + words - 1 or tuple(shape) != item_shape:
        raise MNIST.error(path, "it is not an idx file of such data")
    if count == 0 or len(content) != expected:
        raise MNIST.error(path, f"it has {len(content):,} bytes; {count:,} items take {expected:,}")
    values = np.frombuffer(content, np.uint8, offset=4 * words).copy()
    return torch.from_numpy(values).view(count, *item_shape)
