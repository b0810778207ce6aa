"""Accelerate: adaptive batches for a loop that prepares its model and loaders."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

import kaitian_mpi
from kaitian_mpi.integrations.adaptive import install


class AdaptiveAccelerator(Accelerator):
    """An Accelerator whose prepared loaders give each rank the rows that its speed allows.

    It takes the arguments of an Accelerator, and does what `kaitian-run --adaptive` does, in a
    script that `kaitian-run` has started. Creating it is collective over all ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Initialize MPI if needed, and extend what loaders and models are made of."""
        install(kaitian_mpi.init())
        super().__init__(*args, **kwargs)
