"""Lightning: adaptive batches for a Trainer with DDP."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy

import kaitian_mpi
from kaitian_mpi.integrations.adaptive import install


class AdaptiveStrategy(DDPStrategy):
    """DDP whose loaders give each rank the rows that its speed allows.

    `Trainer(strategy=AdaptiveStrategy())` does what `kaitian-run --adaptive` does, in a script that
    `kaitian-run` has started. It takes the arguments of Lightning's `DDPStrategy`.
    """

    def setup_environment(self) -> None:
        """Initialize MPI if needed, and extend what loaders and models are made of. Collective."""
        install(kaitian_mpi.init())
        super().setup_environment()
