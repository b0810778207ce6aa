"""Intel GPUs: torch's own module `torch.xpu`, and XCCL, which is torch's name for oneCCL on them.

Sources: intel/torch-xpu-ops' `src/xccl/xccl.h` and `ProcessGroupXCCL.cpp` (dtypes, reductions,
futures); PyTorch's `torch/distributed/distributed_c10d.py` (how the group is made),
`torch/xpu/__init__.py`, `memory.py` and `streams.py`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kaitian_mpi.devices.accelerator import Accelerator
from kaitian_mpi.devices.cuda import supports_as_nccl
from kaitian_mpi.devices.plugin import KindError
from kaitian_mpi.devices.visibility import VISIBILITY


class XpuDevice(Accelerator):
    """An Intel GPU, or one tile of it; its collective library is oneCCL, by torch's XCCL."""

    kind = "xpu"
    torch_type = "xpu"
    vendor_backend = "xccl"
    library = "XCCL"
    visibility = VISIBILITY["xpu"]
    pins_memory = True
    futures_handle_streams = True

    def count(self) -> int:
        """Return the number of visible GPUs; 0 if torch was not built for Intel's.

        Raises:
            KindError: torch was, but finds none.
        """
        if not torch.xpu._is_compiled():
            return 0
        count = super().count()
        if not count and not self._is_hidden():
            raise self._unusable("it finds none (sycl-ls lists those of the driver)")
        return count

    def vendor_supports(self, dtype: torch.dtype, reduction: str | None) -> bool:
        """Return whether XCCL supports this dtype; other dtypes go through host memory."""
        return supports_as_nccl(dtype, reduction)

    def create_vendor_group(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> Any:
        """Return torch's own process group over XCCL."""
        if not dist.is_xccl_available():
            raise KindError(
                "this build of torch has no XCCL, which xpu devices need; install torch's official "
                "build for them"
            )
        made: Any = dist.distributed_c10d  # without type information in torch's other builds
        options = made.ProcessGroupXCCL.Options()
        options._timeout = timeout
        return made.ProcessGroupXCCL(store, rank, size, options)
