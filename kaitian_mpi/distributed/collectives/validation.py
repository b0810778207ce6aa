"""Checks a collective's arguments before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kaitian_mpi.errors import UnsupportedError


def not_dense(tensor: torch.Tensor, name: str) -> UnsupportedError:
    """Return the error for an operation that does not support sparse tensors."""
    return UnsupportedError(
        f"{name}: found a tensor of layout {tensor.layout}, needed a dense one; only the "
        "sum of all_reduce takes torch.sparse_coo"
    )


def check_pieces(
    pieces: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    size: int,
    name: str,
    *,
    equal: bool = False,
) -> None:
    """Check a list of tensors by rank.

    Args:
        pieces: one tensor per rank.
        tensor: the pieces must have its dtype and, if `equal`, its size.
        size: the number of ranks.
        name: the operation, for error messages.
        equal: whether all pieces must have the size of `tensor`.

    Raises:
        UnsupportedError: the number of pieces, a dtype or a size is wrong.
    """
    if len(pieces) != size:
        raise UnsupportedError(f"{name}: found {len(pieces)} tensors for {size} ranks")
    for rank, piece in enumerate(pieces):
        if piece.dtype != tensor.dtype:
            raise UnsupportedError(
                f"{name}: found {piece.dtype} for rank {rank}, needed {tensor.dtype} as the others"
            )
        if equal and piece.numel() != tensor.numel():
            raise UnsupportedError(
                f"{name}: found {piece.numel()} elements for rank {rank}, needed {tensor.numel()}"
            )


def check_whole(whole: torch.Tensor, part: torch.Tensor, size: int, name: str) -> None:
    """Check that one tensor has a part for each of `size` ranks.

    Raises:
        UnsupportedError: its size or dtype is wrong.
    """
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise UnsupportedError(
            f"{name}: found {whole.numel()} elements of {whole.dtype}, needed {size} times "
            f"{part.numel()} of {part.dtype}"
        )


def check_splits(tensor: torch.Tensor, splits: Sequence[int], size: int) -> None:
    """Check that the ranks' splits sum to a tensor's first dimension; no splits mean equal parts.

    Raises:
        UnsupportedError: they do not.
    """
    shape = tensor.shape
    length = shape[0] if shape else 1
    if not splits:
        if length % size:
            raise UnsupportedError(
                f"all_to_all_single: found a first dimension of {length}, needed a multiple of "
                f"{size}, or split sizes"
            )
    elif len(splits) != size or sum(splits) != length:
        raise UnsupportedError(
            f"all_to_all_single: found split sizes {list(splits)}, needed {size} that sum to "
            f"{length}"
        )


def element_counts(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the number of elements of each rank's part of a tensor's first dimension."""
    if not splits:
        return [tensor.numel() // size] * size
    row = math.prod(tensor.shape[1:])
    return [split * row for split in splits]
