"""Moves a batch of any structure to a device, or changes its tensors in another way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
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

    def move(tensor: torch.Tensor) -> torch.Tensor:
        placed = tensor.to(device, non_blocking=True)
        if placed.ndim == 4 and placed.is_floating_point():
            placed = placed.contiguous(memory_format=memory_format)
        return placed

    return map_tensors(batch, move, lambda value: value.to(device))


def map_tensors(
    batch: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    change_object: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Return a batch with every tensor in it changed; what is no tensor stays as it is.

    Args:
        batch: a tensor, or a list, tuple, named tuple, mapping or dataclass of batches.
        change: returns what to put in a tensor's place.
        change_object: does so for an object with a method `to`; None means the object itself.
    """
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if type(batch) in (str, bytes, int, float, bool, type(None)):
        return batch
    if callable(getattr(batch, "to", None)):  # first: some are tuples or mappings as well
        changed = change_object(batch)
        return batch if changed is None else changed
    if isinstance(batch, Mapping):
        values = {key: map_tensors(value, change, change_object) for key, value in batch.items()}
        return _like(batch, values)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change, change_object) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, change, change_object) for value in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        copied = copy.copy(batch)
        for field in fields(batch):
            value = map_tensors(getattr(batch, field.name), change, change_object)
            object.__setattr__(copied, field.name, value)
        return copied
    return batch


def _like(original: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return the values in a mapping of the original's class, where that can be changed."""
    if type(original) is dict or not isinstance(original, MutableMapping):
        return values
    moved = copy.copy(original)
    moved.update(values)
    return moved
