"""Random crops and flips that do not depend on which rank computes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import Dataset

from kaitian_mpi.recipes.datasets.arrays import ImageArrays
from kaitian_mpi.train.data.sampler import random_bits

KINDS = ("crop", "crop-flip")


class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Applies a random crop, and with "crop-flip" a random horizontal flip, to images.

    A sample's augmentation depends only on (seed, epoch, sample index), not on the rank, the batch
    or the order, so that a run's images are the same however they are divided among the ranks.

    Args:
        arrays: the images.
        kind: one of `KINDS`.
        seed: any integer.
    """

    gives_batches = True

    def __init__(self, arrays: ImageArrays, kind: str, seed: int) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
        self.arrays = arrays
        self.kind = kind
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that seeds the augmentation; call it before a loader's iterator starts."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.arrays)

    def __getitem__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of these n samples, augmented and normalized; n may be 0.

        Returns:
            float32 [n, C, H, W] and int64 [n].
        """
        chosen = torch.tensor(indices, dtype=torch.int64)
        images = self.arrays.images[chosen]
        top, left, flipped = draw_crops_and_flips(
            self.seed, self.epoch, indices, images.shape[2] // 8
        )
        images = crop(images, top, left)
        if self.kind == "crop-flip":
            images = torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)
        return self.arrays.normalize(images), self.arrays.labels[chosen]


def draw_crops_and_flips(
    seed: int, epoch: int, indices: Sequence[int], pad: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the random crop and flip of each of n samples.

    Returns:
        The top row and left column of the crop in the padded image, int64 [n] from 0 to 2 * `pad`,
        and whether to flip, bool [n].
    """
    words = random_bits(seed, epoch, indices)
    # Each number is scaled from 31 bits of its own: the bias is below 2 * pad / 2**31.
    choices, low_31 = np.uint64(2 * pad + 1), np.uint64(0x7FFF_FFFF)
    top = ((words & low_31) * choices) >> np.uint64(31)
    left = (((words >> np.uint64(31)) & low_31) * choices) >> np.uint64(31)
    flipped = (words >> np.uint64(63)).astype(bool)
    return (
        torch.from_numpy(top.astype(np.int64)),
        torch.from_numpy(left.astype(np.int64)),
        torch.from_numpy(flipped),
    )


def crop(images: torch.Tensor, top: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Pad each image with zeros, an eighth of its height on every side, and crop it.

    Args:
        images: [n, C, H, W].
        top: first row to keep of each padded image, int64 [n].
        left: first column to keep, int64 [n].

    Returns:
        [n, C, H, W].
    """
    count, _, height, width = images.shape
    padded = functional.pad(images, (height // 8,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(count), :, top, left]
