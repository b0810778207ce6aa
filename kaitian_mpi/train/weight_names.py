"""The names under which files have a model's weights: plain, and each tensor once."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch

_OF_COMPILED = "_orig_mod."  # torch.compile wraps a module and gives its weights this prefix


def plain_name(name: str) -> str:
    """Return a weight's name in the module before torch.compile."""
    return name.replace(_OF_COMPILED, "")


def repeated_names(state: Mapping[str, Any], preferred: Container[str] = ()) -> dict[str, str]:
    """Return the names of tensors in memory that another tensor has whole, and that one's name.

    As with tied weights: to save or load that other one is enough. These are the names that
    `safetensors.torch.load_model` allows a file to lack.

    Args:
        state: a module's `state_dict()`, whose tensors share memory as the module's do.
        preferred: of tensors that have all of the same memory, one of these is the other one.
    """
    by_memory: dict[tuple[torch.device, int], list[str]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
            memory = (value.device, value.untyped_storage().data_ptr())
            by_memory.setdefault(memory, []).append(name)
    repeated: dict[str, str] = {}
    for names in by_memory.values():
        whole = [name for name in names if is_whole(state[name])]
        if whole:
            kept = next((name for name in whole if name in preferred), whole[0])
            repeated |= {name: kept for name in names if name != kept}
    return repeated


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has all of its memory, rather than being a part of a larger one."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
