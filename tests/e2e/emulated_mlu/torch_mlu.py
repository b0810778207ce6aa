"""An emulated plug-in: a host's devices, listed once by MLU_VISIBLE_DEVICES, as strict as CUDA."""

import os
import types

import torch
import torch.distributed as dist
from torch.utils import backend_registration

HOST = [f"board {number}" for number in range(8)]


def visible():
    listed = os.environ.get("MLU_VISIBLE_DEVICES")
    if listed is None:
        return list(HOST)
    found = []
    for entry in listed.split(","):  # it ends at what is no device; two of a kind are none
        if not entry.isdigit() or int(entry) >= len(HOST):
            break
        if HOST[int(entry)] in found:
            return []
        found.append(HOST[int(entry)])
    return found


VISIBLE, current = visible(), [0]


def checked(index):
    if not 0 <= index < len(VISIBLE):
        raise RuntimeError(f"invalid device ordinal {index} of {len(VISIBLE)}")
    return index


class Hook(torch._C._acc.PrivateUse1Hooks):
    def is_available(self):
        return bool(VISIBLE)

    def has_primary_context(self, index):
        return True

    def is_built(self):
        return True


class Guard(torch._C._acc.DeviceGuard):
    def type_(self):
        return torch._C._autograd.DeviceType.PrivateUse1


class OnDevice(torch.Tensor):
    @staticmethod
    def __new__(cls, size, index):
        return torch.Tensor._make_wrapper_subclass(cls, size, device=torch.device("mlu", index))

    __torch_dispatch__ = None  # nothing is computed


def empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    index = current[0] if device is None or device.index is None else device.index
    return OnDevice(size, checked(index))


module = types.ModuleType("mlu")
vars(module).update(
    device_count=lambda: len(VISIBLE),
    is_available=lambda: bool(VISIBLE),
    is_initialized=lambda: True,
    current_device=lambda: current[0],
    set_device=lambda index: current.__setitem__(0, checked(torch.device("mlu", index).index)),
    get_device_name=lambda index: VISIBLE[checked(index)],
    get_device_properties=lambda index: types.SimpleNamespace(
        total_memory=1 << 30, uuid=VISIBLE[checked(index)]
    ),
    manual_seed_all=lambda seed: None,
    get_rng_state=lambda index: torch.get_rng_state(),
    set_rng_state=lambda state, index: None,
    _is_in_bad_fork=lambda: False,
)
backend_registration._setup_privateuseone_for_python_backend("mlu", module, Hook(), Guard())
library = torch.library.Library("aten", "IMPL")
library.impl("empty.memory_format", empty, "PrivateUse1")
dist.Backend.register_backend("cncl", dist.ProcessGroupGloo, devices=["mlu"])  # unused
