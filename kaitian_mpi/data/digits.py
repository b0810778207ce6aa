"""The 1,797 handwritten digits that come with scikit-learn: real images without a download."""

from __future__ import annotations

import torch
from torch.nn import functional

from kaitian_mpi.data.arrays import ImageArrays
from kaitian_mpi.data.holdout import hold_out_shuffled
from kaitian_mpi.errors import UserError

_BRIGHTEST = 16
# Of all images, enlarged.
_MEAN = (0.3052,) * 3
_STD = (0.3236,) * 3


def load(val_split: float) -> tuple[ImageArrays, ImageArrays]:
    """Return training and validation images, 3x32x32: 8x8 enlarged, with three equal channels.

    The validation set is chosen by one fixed permutation, the same for every seed.

    Raises:
        UserError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            'the digits data set needs scikit-learn; pip install "kaitian-mpi[demo]"'
        ) from error
    digits = load_digits()
    small = torch.from_numpy(digits.images).float().unsqueeze(1) * (255 / _BRIGHTEST)
    large = functional.interpolate(small, (32, 32), mode="bilinear").round().byte()
    labels = torch.from_numpy(digits.target).long()
    arrays = ImageArrays(large.expand(-1, 3, -1, -1), labels, _MEAN, _STD)
    return hold_out_shuffled(arrays, val_split)
