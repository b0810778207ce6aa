"""Moves parameters to devices, which stay the same objects."""

from __future__ import annotations

import torch
from torch import nn


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device; its parameters stay the same objects, also if modules share them.

    `Module.to` makes new ones for devices of plug-ins.
    """
    for part in module.modules():
        move_own(part, device)


def move_own(module: nn.Module, device: torch.device) -> None:
    """Move a module's own parameters and buffers to a device, and not those of its children."""
    for parameter in module.parameters(recurse=False):
        if parameter.device.type != device.type:
            set_data(parameter, parameter.detach().to(device))
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else buffer.to(device)


def set_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Give a parameter other data, perhaps on another device."""
    parameter.grad = None
    try:
        parameter.data = data
    except RuntimeError:  # "incompatible tensor type", of plug-ins
        torch.utils.swap_tensors(parameter, nn.Parameter(data, parameter.requires_grad))
