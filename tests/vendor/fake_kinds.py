"""Two device kinds whose ranks are joined by the fake vendor's library."""

from __future__ import annotations

import fake_device
import fake_library
import psutil
import torch

from kaitian_mpi.devices import KINDS

_keep = []


class VendorDevice:
    """A fake accelerator; each process has a device of its own, whatever its number."""

    kind = "vendor"
    vendor_backend = fake_library.NAME

    def vendor_takes(self, dtype: torch.dtype, reduction: str | None) -> bool:
        if reduction is None:
            return dtype in fake_library.TYPES
        if reduction == "PREMUL_SUM":
            return dtype in (torch.float64, torch.float32, torch.float16)
        if reduction == "AVG" and dtype is torch.bool:
            return False
        is_known = reduction in {kind.name for kind in fake_library.OPERATIONS}
        return is_known and dtype in fake_library.TYPES

    def count(self) -> int:
        return 8

    def torch_device(self, index: int) -> torch.device:
        return torch.device(fake_device.TYPE, 0)

    def select(self, index: int) -> None:
        pass

    def synchronize(self, index: int) -> None:
        torch.get_device_module(fake_device.TYPE).synchronize()

    def name(self, index: int) -> str:
        return "fake accelerator"

    def memory_bytes(self, index: int) -> int:
        return 1 << 32

    def memory_limit_bytes(self, index: int, sharers: int) -> int:
        return 1 << 32

    def restart_memory_peak(self, index: int) -> None:
        pass

    def memory_peak_bytes(self, index: int) -> int:
        return psutil.Process().memory_info().rss


class OtherVendorDevice(VendorDevice):
    """The same of another vendor, whose library does not talk to the first one's."""

    kind = "vendor2"


def register() -> None:
    """Make torch know the device type and the library, and the package the kinds."""
    _keep.append(fake_device.install())
    fake_library.register()
    KINDS["vendor"] = "fake_kinds:VendorDevice"
    KINDS["vendor2"] = "fake_kinds:OtherVendorDevice"
