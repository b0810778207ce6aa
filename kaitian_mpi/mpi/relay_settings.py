"""How tensors cross between device kinds and between hosts."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import gather_values, join_errors

if TYPE_CHECKING:
    from mpi4py import MPI

GROUP_VARIABLE = "KAITIAN_GROUP_BY"
"""The environment variable that acts as `--group-by`."""
GROUPINGS = ("auto", "kind", "kind-and-host")
"""The choices of `--group-by`."""


@dataclass
class RelaySettings:
    """What all process groups of a process have in common; must be the same on every rank."""

    memory_mb: int = TrainingConfig.relay_memory_mb
    """The host memory of one process group's buffers, in MB."""
    dtype: str = TrainingConfig.relay_dtype
    """The dtype in which float32 gradients cross between kinds, `fp32` or `bf16`."""
    network_allreduce: str = TrainingConfig.network_allreduce
    """How host memory is reduced between hosts: `auto`, `mpi` or an algorithm's name."""
    wire: str = TrainingConfig.wire
    """The format of gradients between hosts: `fp32`, `bf16`, `int8` or `int4`."""
    group_by: str = "auto"
    """How ranks are grouped, as `--group-by`; fixed once the job has started."""

    def adopt(self, config: TrainingConfig) -> None:
        """Adopt a run's settings."""
        self.memory_mb, self.dtype = config.relay_memory_mb, config.relay_dtype
        self.network_allreduce, self.wire = config.network_allreduce, config.wire

    def describe(self) -> dict[str, Any]:
        """Return an entry of `summary.json` on what is between device kinds."""
        settings = asdict(self)
        del settings["wire"]  # an entry of its own
        return settings


def agree_on_settings(comm: MPI.Comm, group_by: str = "auto") -> RelaySettings:
    """Return the settings with which a job starts, some ranks' variable or none. Collective."""
    own = group_by if group_by != "auto" else os.environ.get(GROUP_VARIABLE, "").strip() or "auto"
    values = gather_values(comm, own)
    given = sorted({value for value in values if value != "auto"})
    if len(given) > 1 or not {*given} <= {*GROUPINGS}:
        given_by = join_errors([repr(value) if value != "auto" else "" for value in values])
        raise AgreedError(
            f"--group-by or {GROUP_VARIABLE} is {given_by}; give every rank the same, one of "
            f"{', '.join(GROUPINGS)}"
        )
    return RelaySettings(group_by=given[0] if given else "auto")
