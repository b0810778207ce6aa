"""Image datasets held in memory, and validation samples held out of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.utils.data import Dataset

from kaitian_mpi.errors import UserError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ImageArrays(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Labeled images, indexed by a list of sample indices."""

    images: torch.Tensor
    """uint8 [N, C, H, W]; equal channels may be one channel, expanded."""
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
        """Return the batch of these n samples, normalized; n may be 0.

        Returns:
            float32 [n, C, H, W] and int64 [n].
        """
        chosen = torch.tensor(indices, dtype=torch.int64)
        return self.normalize(self.images[chosen]), self.labels[chosen]

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        """Convert uint8 [n, C, H, W] to float32 with mean 0 and standard deviation 1."""
        mean = torch.tensor(self.mean).view(-1, 1, 1) * 255
        std = torch.tensor(self.std).view(-1, 1, 1) * 255
        return images.float().sub_(mean).div_(std)

    def subset(self, chosen: slice | torch.Tensor) -> ImageArrays:
        """Return a subset of the samples; a slice shares memory with this dataset."""
        return ImageArrays(self.images[chosen], self.labels[chosen], self.mean, self.std)


def holdout_size(length: int, fraction: float) -> int:
    """Return how many of `length` samples to hold out: rounded, leaving neither part empty.

    Raises:
        UserError: there are fewer than two samples.
    """
    if length < 2:
        raise UserError(
            f"--dataset: {length} training samples are too few to hold some out for validation; "
            "give a validation set, or at least 2 samples"
        )
    return min(max(round(length * fraction), 1), length - 1)


def shuffled_split(length: int, fraction: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Split sample indices by a fixed permutation, the same for every run.

    Returns:
        Training and validation indices, int64.

    Raises:
        UserError: there are fewer than two samples.
    """
    train = length - holdout_size(length, fraction)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(0))
    return order[:train], order[train:]


def hold_out_shuffled(arrays: ImageArrays, fraction: float) -> tuple[ImageArrays, ImageArrays]:
    """Split images into training and validation sets by a fixed permutation."""
    train, validation = shuffled_split(len(arrays), fraction)
    return arrays.subset(train), arrays.subset(validation)


def hold_out_last(arrays: ImageArrays, fraction: float) -> tuple[ImageArrays, ImageArrays]:
    """Split images into training and validation sets, the last ones for validation."""
    held_out = holdout_size(len(arrays), fraction)
    _log.info("no test set: validating on the last %d of %d samples", held_out, len(arrays))
    train = len(arrays) - held_out
    return arrays.subset(slice(train)), arrays.subset(slice(train, None))
