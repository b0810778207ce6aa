"""Object detection on generated images: as many boxes as an image has, a mean over boxes.

    mpirun -np 2 python examples/ragged_targets.py

The loss is a mean over boxes, and ranks have unlike numbers of them. With `weight`, the gradient is
exactly that of the mean over all boxes of the global batch.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import kaitian_mpi

SIZE, CELL = 32, 8  # pixels of an image and of a cell of the grid, each way
Batch = dict[str, torch.Tensor | list[torch.Tensor]]


class Scenes(Dataset):
    """Images with one to five bright boxes, each in a cell of its own."""

    def __init__(self, first: int, length: int) -> None:
        self.first, self.length = first, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draws = torch.Generator().manual_seed(self.first + index)
        count = int(torch.randint(1, 6, (1,), generator=draws))
        cells = torch.randperm((SIZE // CELL) ** 2, generator=draws)[:count]
        corners = torch.stack([cells // (SIZE // CELL), cells % (SIZE // CELL)], 1) * CELL
        sizes = torch.randint(3, CELL + 1, (count, 2), generator=draws)
        image = 0.1 * torch.rand(1, SIZE, SIZE, generator=draws)
        for (top, left), (height, width) in zip(corners.tolist(), sizes.tolist(), strict=True):
            image[0, top : top + height, left : left + width] += 0.8
        return {"image": image, "cells": cells, "sizes": sizes / CELL}


class Detector(nn.Module):
    """Finds for each cell of an image whether it has a box, and the box's height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
            *(nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 3, 1)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return three numbers for each cell, shaped (batch, cells, 3)."""
        return self.layers(images).flatten(2).transpose(1, 2)


def collate(samples: list[dict[str, torch.Tensor]]) -> Batch:
    """Stack the images; the targets stay lists, one entry for each image."""
    images = torch.stack([sample["image"] for sample in samples])
    return {"images": images} | {
        name: [sample[name] for sample in samples] for name in ("cells", "sizes")
    }


def count_boxes(batch: Batch) -> int:
    """Return how many boxes the mean of the loss is over."""
    return sum(len(cells) for cells in batch["cells"])


def sum_losses(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two sums: the error of the boxes' sizes, and of which cells have a box."""
    found = model(batch["images"])
    truth = torch.zeros_like(found[..., 0])
    of_size = found.new_zeros(())
    for scores, has_box, cells, sizes in zip(
        found, truth, batch["cells"], batch["sizes"], strict=True
    ):
        has_box[cells] = 1
        of_size = of_size + functional.l1_loss(scores[cells, 1:], sizes, reduction="sum")
    of_cells = functional.binary_cross_entropy_with_logits(found[..., 0], truth, reduction="sum")
    return of_size, of_cells


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean loss over the boxes of the batch."""
    of_size, of_cells = sum_losses(model, batch)
    return (of_size + of_cells) / count_boxes(batch)


def measure(model: nn.Module, batch: Batch) -> dict[str, tuple]:
    """Return the sums, each with the number of what it is over."""
    of_size, of_cells = sum_losses(model, batch)
    boxes, cells = count_boxes(batch), len(batch["images"]) * (SIZE // CELL) ** 2
    return {"size error": (of_size * CELL, 2 * boxes), "cell loss": (of_cells, cells)}


def main() -> None:
    """Train for 3 epochs; rank 0 prints the result."""
    world = kaitian_mpi.init()
    torch.manual_seed(0)
    task = kaitian_mpi.Task(
        model=Detector(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        data=Scenes(0, 1024),
        collate=collate,
        loss=loss_of,
        weight=count_boxes,
        validation=Scenes(1024, 256),
        metrics=measure,
    )
    with kaitian_mpi.Training(task, global_batch_size=32, epochs=3) as training:
        for step in training:
            if world.rank == 0 and step.number % 32 == 1:
                print(f"step {step.number} loss {step.loss:.4f} samples {step.batch_sizes}")
        result = training.evaluate()
    if world.rank == 0:
        print(f"held-out size error {result['size error']:.3f} pixels")


if __name__ == "__main__":
    main()
