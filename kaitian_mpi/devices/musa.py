"""Moore Threads devices: the plug-in torch_musa, and MCCL.

Sources: MooreThreads/torch_musa's `torch_musa/csrc/distributed/Register.cpp` (the backend `mccl`),
`ProcessGroupMCCL.cpp` (dtypes, reductions, futures), `torch_musa/core/device.py`, `memory.py` and
`stream.py`; its guide, chapter "Quick start" (variables).
"""

from __future__ import annotations

import torch

from kaitian_mpi.devices.accelerator import Accelerator
from kaitian_mpi.devices.cuda import REDUCED, REDUCTIONS
from kaitian_mpi.devices.visibility import VISIBILITY


class MusaDevice(Accelerator):
    """A Moore Threads GPU; its collective library is MCCL."""

    kind = "musa"
    torch_type = "musa"
    plugin = "torch_musa"
    vendor_backend = "mccl"
    library = "MCCL"
    visibility = VISIBILITY["musa"]
    pins_memory = True
    futures_handle_streams = True

    def vendor_supports(self, dtype: torch.dtype, reduction: str | None) -> bool:
        """Return whether MCCL supports this dtype; other dtypes go through host memory."""
        if reduction == "AVG" and dtype is torch.bool:
            return False
        return dtype in REDUCED and (reduction is None or reduction in REDUCTIONS)
