"""Synthetic images that a model can learn, for tests and benchmarks without any file."""

from __future__ import annotations

import torch
from torch.nn import functional

from kaitian_mpi.recipes.datasets.arrays import ImageArrays
from kaitian_mpi.recipes.datasets.holdout import hold_out_shuffled

_SAMPLES = 2048
_CLASSES = 10
_MEAN = (0.5,) * 3
_STD = (0.24,) * 3


def load(val_split: float) -> tuple[ImageArrays, ImageArrays]:
    """Return training and validation images, 3x32x32: a blurred pattern per class, plus noise.

    The images and the split are the same for every seed.
    """
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(_CLASSES, 3, 4, 4, generator=generator)
    patterns = functional.interpolate(coarse, (32, 32), mode="bilinear")
    labels = torch.arange(_SAMPLES) % _CLASSES
    noise = torch.randn(_SAMPLES, 3, 32, 32, generator=generator)
    images = (127.5 + 40 * patterns[labels] + 50 * noise).clamp_(0, 255).byte()
    return hold_out_shuffled(ImageArrays(images, labels, _MEAN, _STD), val_split)
