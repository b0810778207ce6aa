"""Datasets without a download: scikit-learn's digits, and synthetic images."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.datasets.images import ImageArrays

_BRIGHTEST_DIGIT = 16
# Over all digits, after resizing.
_DIGITS_MEAN = (0.3052,) * 3
_DIGITS_STD = (0.3236,) * 3

_SYNTHETIC_SAMPLES = 2048
_SYNTHETIC_CLASSES = 10


def load_digits(val_split: float) -> tuple[ImageArrays, ImageArrays]:
    """Return 1,797 handwritten digits, 3x32x32: resized from 8x8, three equal channels."""
    table = torch.from_numpy(read_digits())
    small = table[:, :-1].reshape(-1, 1, 8, 8).float() * (255 / _BRIGHTEST_DIGIT)
    large = functional.interpolate(small, (32, 32), mode="bilinear").round().byte()
    return ImageArrays(large, table[:, -1].long(), _DIGITS_MEAN, _DIGITS_STD).split(val_split)


def read_digits() -> np.ndarray:
    """Return one row per digit: 64 pixels from 0 to 16, then the label.

    Reads the file without importing scikit-learn, which would take each rank a second.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise UserError('the digits dataset needs scikit-learn: pip install "kaitian-mpi[demo]"')
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return np.loadtxt(file, delimiter=",", dtype=np.int64)


def make_synthetic(val_split: float) -> tuple[ImageArrays, ImageArrays]:
    """Return images, 3x32x32, that a model can learn: a blurred pattern per class, plus noise.

    They are the same for every seed.
    """
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(_SYNTHETIC_CLASSES, 3, 4, 4, generator=generator)
    patterns = functional.interpolate(coarse, (32, 32), mode="bilinear")
    labels = torch.arange(_SYNTHETIC_SAMPLES) % _SYNTHETIC_CLASSES
    noise = torch.randn(_SYNTHETIC_SAMPLES, 3, 32, 32, generator=generator)
    images = (127.5 + 40 * patterns[labels] + 50 * noise).clamp_(0, 255).byte()
    return ImageArrays(images, labels, (0.5,) * 3, (0.24,) * 3).split(val_split)
