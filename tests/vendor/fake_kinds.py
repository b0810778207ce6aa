"""Two device kinds whose ranks are joined by the fake vendor's library.

They are added as another package adds its own: by the entry points in `fake_kinds-1.0.dist-info`
beside this file, found wherever this folder is on Python's path.
"""

from __future__ import annotations

import os
from typing import Any

import fake_device
import fake_library
import torch
from contracts import chosen_name

from kaitian_mpi.devices.accelerator import Accelerator
from kaitian_mpi.devices.vendors import CudaDevice, MusaDevice, NpuDevice, XpuDevice

_LIBRARY = fake_device.install()  # as a vendor's plug-in makes torch know the device type
fake_library.register()


SHARED = 7
"""The index of the one device that all processes share."""


def _kind_with_this_library() -> Accelerator:
    """Return the built-in kind whose library the fake one is now: what it says of it must hold."""
    return next(k for k in BUILT_IN if k.vendor_backend == chosen_name())


BUILT_IN = (CudaDevice(), XpuDevice(), NpuDevice(), MusaDevice())


class VendorDevice(Accelerator):
    """A fake accelerator; each process has its own device for every index but `SHARED`."""

    kind = "vendor"
    torch_type = fake_device.TYPE
    vendor_backend = fake_library.NAME
    pins_memory = True

    def vendor_supports(self, dtype: torch.dtype, reduction: str | None) -> bool:
        return _kind_with_this_library().vendor_supports(dtype, reduction)

    @property
    def vendor_lacks(self) -> frozenset[str]:
        return _kind_with_this_library().vendor_lacks

    def error_handling(self) -> dict[str, tuple[str, ...]]:
        return _kind_with_this_library().error_handling()

    def abort_vendor_group(self, group: Any) -> None:
        _kind_with_this_library().abort_vendor_group(group)

    def count(self) -> int:
        return 8

    def physical_id(self, index: int) -> str:
        return "shared" if index == SHARED else f"{os.getpid()}/{index}"


class OtherVendorDevice(VendorDevice):
    """A device kind of another vendor, whose library cannot talk to the first one's."""

    kind = "vendor2"
