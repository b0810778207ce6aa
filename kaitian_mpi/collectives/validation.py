"""Checks of what a collective is given, before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kaitian_mpi.errors import UnsupportedError


def not_dense(tensor: torch.Tensor, name: str) -> UnsupportedError:
    """Return the error of an operation that is given a sparse tensor."""
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
        tensor: what their type must be as; where `equal`, their size too.
        size: how many ranks.
        name: the operation, for the error's text.
        equal: whether all sizes must be those of `tensor`.

    Raises:
        UnsupportedError: the number, a type or a size is wrong.
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
    """Check that one tensor holds a part for each of `size` ranks.

    Raises:
        UnsupportedError: its size or type is wrong.
    """
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise UnsupportedError(
            f"{name}: found {whole.numel()} elements of {whole.dtype}, needed {size} times "
            f"{part.numel()} of {part.dtype}"
        )


def element_counts(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the elements of each rank's part of a tensor's first dimension.

    Raises:
        UnsupportedError: the parts do not make up the dimension.
    """
    length = tensor.size(0) if tensor.ndim else 1
    if not splits:
        if length % size:
            raise UnsupportedError(
                f"all_to_all_single: found a first dimension of {length}, needed a multiple of "
                f"{size}, or split sizes"
            )
        return [tensor.numel() // size] * size
    if len(splits) != size or sum(splits) != length:
        raise UnsupportedError(
            f"all_to_all_single: found split sizes {list(splits)}, needed {size} that sum to "
            f"{length}"
        )
    row = math.prod(tensor.shape[1:])
    return [split * row for split in splits]
