"""How tests and benchmarks start jobs: with more ranks than cores, and as root."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

PYTHON = sys.executable
AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
"""The variables with which Open MPI's mpirun lets root start it."""
ENVIRONMENT = {
    **os.environ,
    **dict.fromkeys(AS_ROOT, "1"),
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
}
"""The variables of whoever starts mpirun."""
BENCHMARKS = Path(__file__).parents[1]
"""The folder of what is imported as `shared`, also by scripts in its other folders."""


def add_to_path(folder: Path) -> None:
    """Let the processes that this one starts import what is in a folder."""
    given = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *given])
