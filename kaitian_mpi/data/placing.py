"""Moves a batch of any structure to a device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def place(
    batch: Any, device: torch.device, memory_format: torch.memory_format = torch.contiguous_format
) -> Any:
    """Return a batch with its tensors on a device; what is no tensor stays as it is.

    Args:
        batch: a tensor, a list, tuple, named tuple, mapping or dataclass of batches, or an object
            with a method `to(device)`.
        device: where to.
        memory_format: of floating-point tensors with four dimensions.
    """
    if isinstance(batch, torch.Tensor):
        placed = batch.to(device, non_blocking=True)
        if placed.ndim == 4 and placed.is_floating_point():
            placed = placed.contiguous(memory_format=memory_format)
        return placed
    if type(batch) in (str, bytes, int, float, bool, type(None)):
        return batch
    if callable(getattr(batch, "to", None)):  # first: some are tuples or mappings as well
        moved = batch.to(device)
        return batch if moved is None else moved
    if isinstance(batch, Mapping):
        return _like(
            batch, {key: place(value, device, memory_format) for key, value in batch.items()}
        )
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(place(value, device, memory_format) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(place(value, device, memory_format) for value in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        moved = copy.copy(batch)
        for field in fields(batch):
            value = place(getattr(batch, field.name), device, memory_format)
            object.__setattr__(moved, field.name, value)
        return moved
    return batch


def _like(original: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return the values in a mapping of the original's class, where that can be changed."""
    if type(original) is dict or not isinstance(original, MutableMapping):
        return values
    moved = copy.copy(original)
    moved.update(values)
    return moved
