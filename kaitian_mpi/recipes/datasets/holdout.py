"""Holds out validation samples of a training set that has no test set."""

from __future__ import annotations

import logging

import torch

from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.datasets.arrays import ImageArrays

_log = logging.getLogger(__name__)


def holdout_size(length: int, fraction: float) -> int:
    """Return how many of `length` samples to hold out: rounded, leaving neither part empty.

    Raises:
        UserError: there are fewer than two samples.
    """
    if length < 2:
        raise UserError(
            f"--dataset: found {length} training samples, needed at least 2 to hold some out for "
            "validation"
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
