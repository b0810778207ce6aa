"""A loaded dataset for `--dataset`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset


@dataclass(frozen=True)
class DataSource:
    """The data of a run. A batch of n samples is inputs [n, ...] and labels int64 [n]."""

    train: Dataset
    """The training samples, augmented."""
    validation: Dataset
    """The validation samples, never augmented."""
    num_classes: int
    """The number of classes: all labels are below it."""
    to_count: tuple[Any, ...] = ()
    """Datasets whose labels have to be read, as some may be above `num_classes`."""
