"""AMD devices: torch's builds for ROCm, whose device type is `cuda`, and RCCL.

Sources: PyTorch's documentation, "HIP (ROCm) semantics" (`torch.cuda` and the backend `nccl` are
reused, `torch.version.hip`); `torch/csrc/distributed/c10d/NCCLUtils.hpp`, compiled against RCCL
(dtypes and reductions are those of NCCL); ROCm's documentation, "GPU isolation techniques"
(variables).
"""

from __future__ import annotations

import torch

from kaitian_mpi.devices.cuda import CudaDevice
from kaitian_mpi.devices.visibility import VISIBILITY


class RocmDevice(CudaDevice):
    """An AMD GPU; its collective library is RCCL, which cannot join a group of NCCL's."""

    kind = "rocm"
    library = "RCCL"
    mpi_query = "MPIX_Query_rocm_support"
    visibility = ("ROCR_VISIBLE_DEVICES", *VISIBILITY["rocm"])

    def count(self) -> int:
        """Return the number of visible GPUs; 0 if torch was not built for AMD.

        Raises:
            KindError: torch was, but finds none.
        """
        if not torch.version.hip:
            return 0
        count = torch.cuda.device_count()
        if not count and not self._is_hidden():
            raise self._unusable("it finds none (rocminfo lists those of the driver)")
        return count
