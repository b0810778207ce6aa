"""Image datasets held in memory: normalization, splits, and crops and flips of any rank's batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import Dataset

from kaitian_mpi.errors import UserError
from kaitian_mpi.train.data.sampler import random_bits

AUGMENTATIONS = ("crop", "crop-flip")


@dataclass(frozen=True, eq=False)
class ImageArrays(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Labeled images, indexed by a list of sample indices."""

    images: torch.Tensor
    """uint8 [N, C, H, W]; C is 1 if all channels are equal."""
    labels: torch.Tensor
    """int64 [N]."""
    mean: tuple[float, ...]
    """Per channel, for pixels scaled to 0 to 1."""
    std: tuple[float, ...]
    """Per channel, for pixels scaled to 0 to 1."""
    gives_batches: ClassVar = True

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)

    def __getitem__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of these n samples, normalized; n may be 0."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        return self.normalize(self.images[chosen]), self.labels[chosen]

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        """Convert uint8 images to float32 with mean 0 and standard deviation 1 per channel."""
        mean = torch.tensor(self.mean).view(-1, 1, 1) * 255
        std = torch.tensor(self.std).view(-1, 1, 1) * 255
        return (images.float() - mean).div_(std)

    def split(self, fraction: float) -> tuple[ImageArrays, ImageArrays]:
        """Return training and validation images, by a fixed permutation."""
        train, validation = (
            ImageArrays(self.images[chosen], self.labels[chosen], self.mean, self.std)
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


@dataclass
class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Applies a random crop, and with "crop-flip" a random horizontal flip, to images.

    A sample's augmentation depends only on (seed, epoch, sample index), not on the rank, the batch
    or the order, so that a run's images are the same however they are divided among the ranks.
    """

    arrays: ImageArrays
    kind: str
    """One of `AUGMENTATIONS`."""
    seed: int
    epoch: int = 0
    gives_batches: ClassVar = True

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that seeds the augmentation; call it before a loader's iterator starts."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.arrays)

    def __getitem__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of these samples, augmented and normalized, as `ImageArrays` does."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        images = self.arrays.images[chosen]
        pad = images.shape[2] // 8
        top, left, flipped = draw_crops_and_flips(self.seed, self.epoch, indices, pad)
        images = crop(images, top, left)
        if self.kind == "crop-flip":
            images = torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)
        return self.arrays.normalize(images), self.arrays.labels[chosen]


def draw_crops_and_flips(
    seed: int, epoch: int, indices: Sequence[int], pad: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the random crop and flip of each of n samples."""
    words = random_bits(seed, epoch, indices)
    # Each number is scaled from 31 bits of its own: the bias is below 2 * pad / 2**31.
    choices, low_31 = np.uint64(2 * pad + 1), np.uint64(0x7FFF_FFFF)
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


@dataclass(frozen=True)
class OfficialFiles:
    """A dataset of ten classes that users download, and the errors about its files."""

    name: str
    """The value of `--dataset`."""
    url: str
    """Where to download the official files."""

    def folder(self, data_dir: str) -> Path:
        """Return the folder given by `--data-dir`."""
        if not data_dir:
            raise UserError(
                f"--dataset {self.name} needs --data-dir, the folder with its official files; "
                f"get them from {self.url}"
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
