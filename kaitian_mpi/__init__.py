"""kaitian_mpi: one PyTorch training job over different kinds of accelerators, by MPI.

In your own script, started by mpirun::

    import kaitian_mpi

    world = kaitian_mpi.init()  # torch.distributed is ready, over the backend `kaitian`
    model = kaitian_mpi.data_parallel(model.to(world.device))  # stock DDP, weighted by samples

Installing the package registers the backend `kaitian` and the rendezvous `mpi://` with torch, so
`init_process_group("kaitian", init_method="mpi://")` works as well, without importing it.
"""

from __future__ import annotations

import multiprocessing.process
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kaitian_mpi.runtime import RANK_VARIABLE

if TYPE_CHECKING:
    from kaitian_mpi.distributed.data_parallel import WeightedSum, data_parallel
    from kaitian_mpi.distributed.experts import Experts
    from kaitian_mpi.distributed.startup import init
    from kaitian_mpi.distributed.sync_batch_norm import convert_sync_batchnorm
    from kaitian_mpi.integrations.convert_experts import convert_experts, revert_experts
    from kaitian_mpi.mpi.world import World
    from kaitian_mpi.observe.sink import MetricsSink
    from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler
    from kaitian_mpi.train.task import Task
    from kaitian_mpi.train.training import Training

__version__ = "0.1.0"
__all__ = [
    "Experts",
    "LoadAdaptiveSampler",
    "MetricsSink",
    "Task",
    "Training",
    "WeightedSum",
    "World",
    "__version__",
    "convert_experts",
    "convert_sync_batchnorm",
    "data_parallel",
    "init",
    "revert_experts",
]

_MODULES = {
    "Experts": "kaitian_mpi.distributed.experts",
    "LoadAdaptiveSampler": "kaitian_mpi.train.data.sampler",
    "MetricsSink": "kaitian_mpi.observe.sink",
    "Task": "kaitian_mpi.train.task",
    "Training": "kaitian_mpi.train.training",
    "WeightedSum": "kaitian_mpi.distributed.data_parallel",
    "World": "kaitian_mpi.mpi.world",
    "convert_experts": "kaitian_mpi.integrations.convert_experts",
    "convert_sync_batchnorm": "kaitian_mpi.distributed.sync_batch_norm",
    "data_parallel": "kaitian_mpi.distributed.data_parallel",
    "init": "kaitian_mpi.distributed.startup",
    "revert_experts": "kaitian_mpi.integrations.convert_experts",
}


# multiprocessing imports the script once more, in a process that loads data. Only a rank of ours
# sets the variable: torch imports this package in every process, also in those of other programs.
if RANK_VARIABLE in os.environ and getattr(
    multiprocessing.process.current_process(), "_inheriting", False
):
    import_module("kaitian_mpi.train.data.worker_process")


def __getattr__(name: str) -> Any:
    # Imported on first use, so that a wrong flag is reported before torch and MPI are loaded.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
