"""An accelerator whose memory the host cannot touch, to prove that every path really stages.

Its tensors have a device type of their own and no address: `numpy()` and MPI cannot reach them.
Data crosses to and from the host by copies only; everything else that mixes the two is refused.
"""

from __future__ import annotations

import types

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

# torch 2.8 cannot register a device guard from Python, which `copy_` needs on `privateuseone`.
# Of the device types that have a guard in every build, `lazy` is one that nothing else here uses.
HAS_PYTHON_DEVICES = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
TYPE = "privateuseone" if HAS_PYTHON_DEVICES else "lazy"
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)

copied_elements: list[int] = []
"""Elements of each copy between the device and the host."""


class DeviceTensor(torch.Tensor):
    """A tensor in the fake accelerator's memory."""

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> DeviceTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=TYPE,
        )

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def __repr__(self) -> str:
        return f"DeviceTensor({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func, classes, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        on_host = [a for a in given if not isinstance(a, DeviceTensor) and a.ndim]
        crosses = bool(on_host)
        if crosses and func not in COPIES:
            raise RuntimeError(f"{func}: mixes host memory with the accelerator's")
        wanted = kwargs.get("device")
        to_host = wanted is not None and torch.device(wanted).type == "cpu"
        if wanted is not None:
            kwargs["device"] = "cpu"
        owners = {id(a.memory): a for a in given if isinstance(a, DeviceTensor)}
        owners |= {id(a): a for a in given if not isinstance(a, DeviceTensor)}

        def unwrap(value):
            return value.memory if isinstance(value, DeviceTensor) else value

        def wrap(value):
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in owners:
                return owners[id(value)]
            return value if to_host else DeviceTensor(value)

        if func in COPIES and (crosses or to_host):
            copied_elements.append(given[0].numel())
        return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs)))


def on_device(tensor: torch.Tensor) -> DeviceTensor:
    """Copy a host tensor to the accelerator's memory."""
    return DeviceTensor(tensor.clone())


def install() -> None:
    """Register the device type with torch; it has no streams."""
    if not hasattr(torch, TYPE):
        module = types.ModuleType(TYPE)
        module.is_available = lambda: False  # else torch.distributed.checkpoint uses its streams
        module.current_device = lambda: 0
        if HAS_PYTHON_DEVICES:
            backend_registration._setup_privateuseone_for_python_backend(backend_module=module)
        else:
            torch._register_device_module(TYPE, module)
