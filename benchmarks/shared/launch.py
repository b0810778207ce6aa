"""How tests and benchmarks start jobs: with more ranks than cores, and as root."""

from __future__ import annotations

import os
import sys
import sysconfig

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
