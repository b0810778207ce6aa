"""Two device kinds whose vendors' library is emulated: CPU ranks, connected by gloo over TCP.

Other packages' kinds are found by their entry points: `add_to_path` writes those of this file.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kaitian_mpi.devices.cpu import CpuDevice

KINDS = "vendora", "vendorb"


class VendorA(CpuDevice):
    """A CPU rank whose vendor's library is gloo."""

    kind = KINDS[0]
    vendor_backend = library = "gloo"

    def count(self) -> int:
        """Return how many ranks a host may have."""
        return 64

    def vendor_supports(self, dtype: torch.dtype, reduction: str | None) -> bool:
        """Return whether gloo takes these."""
        return dtype is torch.float32 and reduction in (None, "SUM")

    def create_vendor_group(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> Any:
        """Return a process group of gloo."""
        return dist.ProcessGroupGloo(store, rank, size, timeout)


class VendorB(VendorA):
    """One of another vendor."""

    kind = KINDS[1]


def add_to_path(environ: MutableMapping[str, str], folder: Path) -> None:
    """Let Python find the kinds: write their entry points to an empty folder, and name it."""
    described = folder / "emulated_vendors-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated-vendors\n")
    classes = zip(KINDS, (VendorA, VendorB), strict=True)
    lines = [f"{kind} = emulated_vendors:{each.__name__}\n" for kind, each in classes]
    (described / "entry_points.txt").write_text("[kaitian_mpi.devices]\n" + "".join(lines))
    given = [environ["PYTHONPATH"]] if "PYTHONPATH" in environ else []
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(Path(__file__).parent), *given])
