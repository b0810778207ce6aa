"""Moves a module's parameters to a device; they stay the same objects."""

from __future__ import annotations

import torch
from torch import nn


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device; its parameters stay the same objects, also if modules share them.

    `Module.to` would replace the parameters if the device comes from a plug-in. Their gradients are
    freed. Not collective.
    """
    for submodule in module.modules():
        move_own(submodule, device)


def move_own(module: nn.Module, device: torch.device) -> None:
    """Move a module's own parameters and buffers to a device, but not those of its children."""
    for parameter in module.parameters(recurse=False):
        if parameter.device.type != device.type:
            set_data(parameter, parameter.detach().to(device))
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else buffer.to(device)


def set_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Set a parameter's data, perhaps on another device, and free its gradient."""
    parameter.grad = None
    try:
        parameter.data = data
    except RuntimeError:  # a plug-in's device: "incompatible tensor type"
        torch.utils.swap_tensors(parameter, nn.Parameter(data, parameter.requires_grad))
