"""NVIDIA devices: torch's own module `torch.cuda`, and NCCL. AMD devices: the same, and RCCL.

Sources: PyTorch's `NCCLUtils.hpp` (dtypes), `ProcessGroupNCCL.cpp` (reductions, futures); its
documentation, "HIP (ROCm) semantics".
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kaitian_mpi.devices.accelerator import Accelerator
from kaitian_mpi.devices.plugin import KindError

REDUCED = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    }
)
"""The dtypes that NCCL, and libraries with its interface, reduce."""
BYTES = frozenset(
    {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
)
"""Those that NCCL moves as bytes, but does not reduce in every release of torch."""
REDUCTIONS = frozenset({"SUM", "AVG", "PRODUCT", "MIN", "MAX"})
_PCI_VENDOR = "0x10de"
_PCI_DISPLAY = "0x03"  # the class of display controllers


class CudaDevice(Accelerator):
    """An NVIDIA GPU; its collective library is NCCL."""

    kind = torch_type = "cuda"
    vendor_backend = "nccl"
    library = "NCCL"
    pins_memory = True
    futures_handle_streams = True
    moved = REDUCED | BYTES
    reduced = REDUCED
    reductions = REDUCTIONS | {"PREMUL_SUM"}
    refused = frozenset(
        {("AVG", torch.bool)}
        | {("PREMUL_SUM", t) for t in REDUCED - {torch.float64, torch.float32, torch.float16}}
    )

    def count(self) -> int:
        """Return the number of visible GPUs; 0 if torch was built for another vendor."""
        if not torch.version.cuda:
            return 0
        # Not `is_available`, which initializes the CUDA driver even in a rank that uses the CPU.
        count = torch.cuda.device_count()
        # The usual build of torch for Linux is CUDA's, also on hosts without a GPU.
        if not count and not self._is_hidden() and is_on_pci(_PCI_VENDOR, _PCI_DISPLAY):
            listed = os.environ.get("CUDA_VISIBLE_DEVICES")
            shown = f" (CUDA_VISIBLE_DEVICES is {listed})" if listed else ""
            raise KindError(
                f"the host has an NVIDIA GPU, but torch cannot open it{shown}; check with "
                f"nvidia-smi that the driver is loaded, new enough for CUDA {torch.version.cuda}, "
                "and that this process or container may use the GPU; or hide it with "
                "CUDA_VISIBLE_DEVICES=-1"
            )
        return count

    def create_vendor_group(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> Any:
        """Return torch's own process group over NCCL, or over RCCL in torch's builds for AMD."""
        if not dist.is_nccl_available():
            raise KindError(
                f"this build of torch has no {self.library}, which {self.kind} devices need; "
                "install torch's official build for them"
            )
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)


class RocmDevice(CudaDevice):
    """An AMD GPU; its collective library is RCCL, which cannot join a group of NCCL's."""

    kind = "rocm"
    library = "RCCL"

    @property
    def visibility(self) -> tuple[str, ...]:
        """The variables of ROCm's documentation, "GPU isolation techniques"."""
        return "ROCR_VISIBLE_DEVICES", *super().visibility

    def count(self) -> int:
        """Return the number of visible GPUs; 0 if torch was not built for AMD."""
        if not torch.version.hip:
            return 0
        count = torch.cuda.device_count()
        if not count and not self._is_hidden():
            raise self._unusable("it finds none (rocminfo lists those of the driver)")
        return count


def is_on_pci(vendor: str, device_class: str, bus: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Return whether Linux lists a PCI device of a vendor, such as `0x10de`, and class."""
    for device in bus.glob("*"):
        try:
            found = (device / "vendor").read_text().strip(), (device / "class").read_text()
        except OSError:
            continue
        if found[0] == vendor and found[1].startswith(device_class):
            return True
    return False
