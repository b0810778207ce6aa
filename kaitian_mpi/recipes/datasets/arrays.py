"""An image dataset held in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.utils.data import Dataset


@dataclass(frozen=True, eq=False)
class ImageArrays(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Labelled images, indexed by a list of sample indices."""

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
        """Return the batch of these n samples, normalised; n may be 0.

        Returns:
            float32 [n, C, H, W] and int64 [n].
        """
        chosen = torch.tensor(indices, dtype=torch.int64)
        return self.normalise(self.images[chosen]), self.labels[chosen]

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        """Convert uint8 [n, C, H, W] to float32 with mean 0 and standard deviation 1."""
        mean = torch.tensor(self.mean).view(-1, 1, 1) * 255
        std = torch.tensor(self.std).view(-1, 1, 1) * 255
        return images.float().sub_(mean).div_(std)

    def subset(self, chosen: slice | torch.Tensor) -> ImageArrays:
        """Return a subset of the samples; a slice shares memory with this dataset."""
        return ImageArrays(self.images[chosen], self.labels[chosen], self.mean, self.std)
