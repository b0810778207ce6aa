"""Hugging Face's Trainer, and those of TRL: adaptive batches."""

from __future__ import annotations

from transformers import TrainerCallback

import kaitian_mpi
from kaitian_mpi.integrations.adaptive import install


class AdaptiveCallback(TrainerCallback):
    """Makes the batches of Trainers that are created after it adaptive.

    `Trainer(..., callbacks=[AdaptiveCallback()])` does what `kaitian-run --adaptive` does, in a
    script that `kaitian-run` has started. Creating it is collective over all ranks.
    """

    def __init__(self) -> None:
        """Initialize MPI if needed, and extend what the Trainer is made of."""
        install(kaitian_mpi.init())
