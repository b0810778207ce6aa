"""Tells whether this host may have an accelerator, before torch is loaded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

_BUILT_FOR = re.compile(r"^(cuda|hip|xpu)\b.*= *['\"]", re.MULTILINE)
# Of NVIDIA (also in WSL2 and on Jetson), AMD and Intel.
_DRIVERS = ("nvidiactl", "nvhost-ctrl", "nvmap", "dxg", "kfd", "dri/renderD*")
_OUR_PLUG_IN = "kaitian"


def may_have_accelerators(files: Path = Path("/dev")) -> bool:
    """Return whether torch might start a driver here: `files` are those of the system's devices.

    It starts none if this build is for the CPU, or no driver is installed; and if no vendor extends
    it by a plug-in. Without torch, there are none.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    build = Path(torch.origin).with_name("version.py").read_text()
    if _BUILT_FOR.search(build) and any(any(files.glob(driver)) for driver in _DRIVERS):
        return True
    plug_ins = {entry.name for entry in importlib.metadata.entry_points(group="torch.backends")}
    return not plug_ins <= {_OUR_PLUG_IN}
