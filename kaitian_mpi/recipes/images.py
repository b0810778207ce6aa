"""Image datasets: normalization, splits, and crops and flips of any rank's batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import Dataset

from kaitian_mpi.errors import UserError
from kaitian_mpi.train.data.sampler import random_bits

_BRIGHTEST_DIGIT = 16
_DIGITS_MEAN = (0.3052,) * 3  # over all digits, after resizing
_DIGITS_STD = (0.3236,) * 3
_SYNTHETIC_SAMPLES = 2048
_SYNTHETIC_CLASSES = 10


class Images(Protocol):
    """Images in memory or in files, of one size."""

    def __getitem__(self, indices: torch.Tensor, /) -> torch.Tensor:
        """Return the images of n indices: uint8 [n, C, H, W]."""
        ...


@dataclass(eq=False)
class ImageArrays(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Labeled images, indexed by a list of sample indices, with optional random crops and flips.

    A sample's augmentation depends only on (seed, epoch, sample index), not on the rank, the batch
    or the order, so that a run's images are the same however they are divided among the ranks.
    """

    images: Images
    """uint8 [N, C, H, W]; C is 1 if all channels are equal."""
    labels: torch.Tensor
    """int64 [N]."""
    mean: tuple[float, ...]
    """Per channel, like `std`, for pixels scaled to 0 to 1."""
    std: tuple[float, ...]
    augment: str = "none"
    """One of none, crop and crop-flip."""
    seed: int = 0
    epoch: int = 0
    gives_batches: ClassVar = True

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that seeds the augmentation; call it before a loader's iterator starts."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of these n samples; n may be 0.

        The images are float32, with mean 0 and standard deviation 1 per channel.
        """
        chosen = torch.tensor(indices, dtype=torch.int64)
        images = self.images[chosen]
        if self.augment != "none":
            pad = images.shape[2] // 8
            top, left, flipped = draw_crops_and_flips(self.seed, self.epoch, indices, pad)
            images = crop(images, top, left)
            if self.augment == "crop-flip":
                images = torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)
        mean = torch.tensor(self.mean).view(-1, 1, 1) * 255
        std = torch.tensor(self.std).view(-1, 1, 1) * 255
        return (images.float() - mean).div_(std), self.labels[chosen]

    def split(self, fraction: float) -> tuple[ImageArrays, ImageArrays]:
        """Return training and validation images, by a fixed permutation."""
        train, validation = (
            replace(self, images=self.images[chosen], labels=self.labels[chosen])
            for chosen in shuffled_split(len(self), fraction)
        )
        return train, validation


def shuffled_split(length: int, fraction: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Split sample indices by a fixed permutation, the same for every run."""
    if length < 2:
        raise UserError(
            f"--dataset: {length} training samples are too few to hold some out for validation; "
            "give a validation set, or at least 2 samples"
        )
    train = length - min(max(round(length * fraction), 1), length - 1)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(0))
    return order[:train], order[train:]


def draw_crops_and_flips(
    seed: int, epoch: int, indices: Sequence[int], pad: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the random crop and flip of each of n samples."""
    words = random_bits(seed, epoch, indices)
    # Each number is scaled from 31 bits of its own: the bias is below 2 * pad / 2**31.
    choices = np.uint64(2 * pad + 1)
    low_31 = np.uint64(0x7FFF_FFFF)
    top = ((words & low_31) * choices) >> np.uint64(31)
    left = (((words >> np.uint64(31)) & low_31) * choices) >> np.uint64(31)
    flipped = (words >> np.uint64(63)).astype(bool)
    crops = torch.from_numpy(np.stack([top, left]).astype(np.int64))
    return crops[0], crops[1], torch.from_numpy(flipped)


def crop(images: torch.Tensor, top: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Pad images [n, C, H, W] with zeros, an eighth of H on every side, and crop them to H x W."""
    count, _, height, width = images.shape
    padded = functional.pad(images, (height // 8,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(count), :, top, left]


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
