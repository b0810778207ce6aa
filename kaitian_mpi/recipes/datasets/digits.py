"""The 1,797 handwritten digits that come with scikit-learn: real images without a download."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.datasets.arrays import ImageArrays
from kaitian_mpi.recipes.datasets.holdout import hold_out_shuffled

_BRIGHTEST = 16
# Over all images, after resizing.
_MEAN = (0.3052,) * 3
_STD = (0.3236,) * 3


def load(val_split: float) -> tuple[ImageArrays, ImageArrays]:
    """Return training and validation images, 3x32x32: resized from 8x8, three equal channels.

    The validation set comes from one fixed permutation, the same for every seed.

    Raises:
        UserError: scikit-learn is not installed.
    """
    table = torch.from_numpy(_read())
    small = table[:, :-1].reshape(-1, 1, 8, 8).float() * (255 / _BRIGHTEST)
    large = functional.interpolate(small, (32, 32), mode="bilinear").round().byte()
    labels = table[:, -1].long()
    arrays = ImageArrays(large.expand(-1, 3, -1, -1), labels, _MEAN, _STD)
    return hold_out_shuffled(arrays, val_split)


def _read() -> np.ndarray:
    """Return one row per image: 64 pixels from 0 to 16, then the label.

    Reads the file without importing scikit-learn, which would take each rank a second.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise UserError('the digits dataset needs scikit-learn: pip install "kaitian-mpi[demo]"')
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return np.loadtxt(file, delimiter=",", dtype=np.int64)
