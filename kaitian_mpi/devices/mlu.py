"""Cambricon devices: the plug-in torch_mlu, and CNCL.

Sources: Cambricon/torch_mlu's `torch_mlu/mlu/cncl.py` (the backend `cncl`),
`torch_mlu/csrc/framework/distributed/process_group_cncl.cpp` (dtypes, reductions, futures),
`torch_mlu/mlu/device.py`, `memory.py` and `streams.py`.
"""

from __future__ import annotations

import torch

from kaitian_mpi.devices.accelerator import Accelerator
from kaitian_mpi.devices.cuda import REDUCED
from kaitian_mpi.devices.visibility import VISIBILITY

# Without float64, which the plug-in would pass on as float32.
_TYPES = REDUCED - {torch.float64}


class MluDevice(Accelerator):
    """A Cambricon MLU; its collective library is CNCL."""

    kind = "mlu"
    torch_type = "mlu"
    plugin = "torch_mlu"
    vendor_backend = "cncl"
    library = "CNCL"
    visibility = VISIBILITY["mlu"]
    pins_memory = True
    futures_handle_streams = True

    def vendor_supports(self, dtype: torch.dtype, reduction: str | None) -> bool:
        """Return whether CNCL supports this dtype; other dtypes go through host memory."""
        return dtype in _TYPES and reduction in (None, "SUM", "PRODUCT", "MIN", "MAX")
