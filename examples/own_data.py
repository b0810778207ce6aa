"""Datasets of torchvision and of Hugging Face for `kaitian-train`.

    mpirun -np 4 kaitian-train --dataset examples.own_data:flowers --data-dir ~/data --model cnn
    mpirun -np 4 kaitian-train --dataset examples.own_data:beans --model cnn

Each function returns training and validation data, whose samples are (input tensor, int class)
pairs of one shape. Download the data before, once on each host.
"""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

SIZE = 64  # pixels


def flowers(data_dir: str) -> tuple[Dataset, Dataset]:
    """Return torchvision's Flowers102; its other datasets, such as Food101, are used alike."""
    from torchvision import datasets, transforms

    transform = transforms.Compose(
        [
            transforms.Resize(SIZE),
            transforms.CenterCrop(SIZE),
            transforms.ToTensor(),
            transforms.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
        ]
    )
    train = datasets.Flowers102(data_dir, "train", transform)
    validation = datasets.Flowers102(data_dir, "val", transform)
    return train, validation


class Rows(Dataset[tuple[torch.Tensor, int]]):
    """Rows of a dataset of Hugging Face, with a picture and a class, as pairs."""

    def __init__(self, rows: Any, picture: str, label: str) -> None:
        self._rows = rows
        self._picture = picture
        self._label = label
        self.num_classes = rows.features[label].num_classes  # or all rows would be read to count

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = self._rows[index]
        picture = row[self._picture].convert("RGB").resize((SIZE, SIZE))
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        return (pixels / 255 - 0.5) / 0.25, row[self._label]


def beans() -> tuple[Dataset, Dataset]:
    """Return Hugging Face's beans; other datasets differ in the names of their columns."""
    from datasets import load_dataset

    rows = load_dataset("AI-Lab-Makerere/beans")
    return Rows(rows["train"], "image", "labels"), Rows(rows["validation"], "image", "labels")
