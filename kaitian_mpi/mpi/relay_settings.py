"""How tensors cross between device kinds and between hosts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kaitian_mpi.config import TrainingConfig


@dataclass
class RelaySettings:
    """What all process groups of a process have in common; must be the same on every rank."""

    memory_mb: int = TrainingConfig.relay_memory_mb
    """The host memory of one process group's buffers, in MB."""
    dtype: str = TrainingConfig.relay_dtype
    """What float32 gradients cross as, `fp32` or `bf16`; they are summed in float32."""
    network_allreduce: str = TrainingConfig.network_allreduce
    """How host memory is reduced between hosts: `auto`, `mpi` or an algorithm's name."""
    wire: str = TrainingConfig.wire
    """What gradients are sent as between hosts: `fp32`, `bf16`, `int8` or `int4`."""
    device_aware: bool = False
    """Whether MPI was given device memory itself: the ranks find out when they first relay."""

    def adopt(self, config: TrainingConfig) -> None:
        """Take over a run's settings."""
        self.memory_mb, self.dtype = config.relay_memory_mb, config.relay_dtype
        self.network_allreduce, self.wire = config.network_allreduce, config.wire

    def describe(self) -> dict[str, Any]:
        """Return what concerns device kinds, as an entry of `summary.json`."""
        settings = asdict(self)
        del settings["wire"]  # an entry of its own
        return settings
