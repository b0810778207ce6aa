"""NVIDIA devices: torch's own module `torch.cuda`, and NCCL.

Sources: PyTorch's `torch/csrc/distributed/c10d/NCCLUtils.hpp` (dtypes) and `ProcessGroupNCCL.cpp`
(reductions, futures), `torch/cuda/__init__.py`; NCCL's `src/init.cc` (one rank per PCI address, in
later releases per UUID) and user guide, "Using MIG instances"; NVIDIA's MIG user guide (names of
instances, and that a process sees one of them). Instances have not been tried on hardware.
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
from kaitian_mpi.devices.visibility import VISIBILITY

REDUCED = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
"""The dtypes that NCCL, and libraries with its interface, reduce."""
_BYTES = frozenset(
    {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
)  # moved as bytes, but not reduced in every release of torch
REDUCTIONS = frozenset({"SUM", "AVG", "PRODUCT", "MIN", "MAX"})
_SCALED = frozenset({torch.float64, torch.float32, torch.float16})  # by PREMUL_SUM
_PCI_VENDOR = "0x10de"
_PCI_DISPLAY = "0x03"  # the class of display controllers
_MIG = "MIG"
_JOINS_MIG = (2, 32)  # the release of NCCL whose user guide says so first


class CudaDevice(Accelerator):
    """An NVIDIA GPU; its collective library is NCCL."""

    kind = "cuda"
    torch_type = "cuda"
    vendor_backend = "nccl"
    library = "NCCL"
    mpi_query = "MPIX_Query_cuda_support"
    visibility = VISIBILITY["cuda"]
    pins_memory = True
    futures_handle_streams = True

    def count(self) -> int:
        """Return the number of visible GPUs; 0 if torch was built for another vendor.

        In torch's builds for AMD, AMD's devices have the same torch type.

        Raises:
            KindError: the host has a GPU, but torch cannot open it.
        """
        if not torch.version.cuda:
            return 0
        # Not `is_available`, which initializes the CUDA driver even in a rank that uses the CPU.
        count = torch.cuda.device_count()
        # The usual build of torch for Linux is CUDA's, also on hosts without a GPU.
        if not count and not self._is_hidden() and is_on_pci(_PCI_VENDOR, _PCI_DISPLAY):
            listed = os.environ.get(self.visibility[0])
            shown = f" (CUDA_VISIBLE_DEVICES is {listed})" if listed else ""
            raise KindError(
                f"the host has an NVIDIA GPU, but torch cannot open it{shown}; check with "
                f"nvidia-smi that the driver is loaded, new enough for CUDA {torch.version.cuda}, "
                "and that this process or container may use the GPU; or hide it with "
                "CUDA_VISIBLE_DEVICES=-1"
            )
        return count

    def vendor_supports(self, dtype: torch.dtype, reduction: str | None) -> bool:
        """Return whether NCCL supports this dtype; other dtypes go through host memory."""
        if reduction == "PREMUL_SUM":
            return dtype in _SCALED
        return supports_as_nccl(dtype, reduction)

    def library_id(self, index: int) -> str:
        """Return the GPU's PCI address, also for a MIG instance where NCCL goes by that."""
        if self._mig_instance(index) and not self._joins_mig_instances():
            return super()._hardware_id(index)
        return self.physical_id(index)

    def _hardware_id(self, index: int) -> str:
        """Return the PCI address; of a MIG instance with its own UUID, since the GPU has others."""
        return f"{super()._hardware_id(index)} {self._mig_instance(index)}".strip()

    def _mig_instance(self, index: int) -> str:
        """Return which instance of a GPU in MIG mode the device is; "" for a whole GPU.

        Instances have memory and multiprocessors of their own.
        """
        try:
            found = self._module().get_device_properties(index)
        except Exception:  # a faulty device has an index as well
            return ""
        if _MIG not in str(getattr(found, "name", "")).split():
            return ""
        listed = os.environ.get(self.visibility[0], "").split(",")
        entry = listed[index].strip() if index < len(listed) else ""
        return entry if entry.startswith(_MIG) else f"{_MIG}-{getattr(found, 'uuid', '')}"

    def _joins_mig_instances(self) -> bool:
        """Return whether NCCL joins instances of one GPU."""
        return dist.is_nccl_available() and torch.cuda.nccl.version()[:2] >= _JOINS_MIG

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


def supports_as_nccl(dtype: torch.dtype, reduction: str | None) -> bool:
    """Return whether a library with NCCL's interface moves a dtype (None), or reduces it."""
    if reduction is None:
        return dtype in REDUCED or dtype in _BYTES
    if reduction == "AVG" and dtype is torch.bool:
        return False
    return dtype in REDUCED and reduction in REDUCTIONS


def is_on_pci(vendor: str, device_class: str, bus: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Return whether the host has a PCI device of a vendor and class; False if that is unknown.

    Args:
        vendor: the vendor's number, such as `0x10de`.
        device_class: the first digits of the class, such as `0x03`.
        bus: the folder in which Linux lists the devices.
    """
    for device in bus.glob("*"):
        try:
            found = (device / "vendor").read_text().strip(), (device / "class").read_text()
        except OSError:
            continue
        if found[0] == vendor and found[1].startswith(device_class):
            return True
    return False
