"""One examination in a process of its own; writes its facts to stdout as JSON.

python -P -m kaitian_mpi.preflight.stage_process NAME ARGUMENTS
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kaitian_mpi.runtime.abort import is_mpi_running
from kaitian_mpi.runtime.system import prctl

if TYPE_CHECKING:
    from mpi4py import MPI

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Make the examination that the command line names."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    result = os.dup(1)
    os.dup2(2, 1)  # vendors' libraries print to stdout
    name, arguments = sys.argv[1:]
    facts = _EXAMINATIONS[name](**json.loads(arguments))
    with open(result, "w") as file:
        json.dump(facts, file)
    sys.stdout.flush()
    os._exit(0)  # a vendor's library may hang where it is unloaded


def _examine_devices(**arguments: Any) -> dict[str, Any]:
    from kaitian_mpi.preflight.device_probe import examine_devices

    return asdict(examine_devices(**arguments))


def _examine_storage(**arguments: Any) -> dict[str, Any]:
    from kaitian_mpi.preflight.disk_probe import examine_storage

    return asdict(examine_storage(**arguments))


def _examine_mpi() -> dict[str, Any]:
    from kaitian_mpi.preflight.collect import collect_mpi

    return asdict(collect_mpi(_start_mpi()))


def _count_ranks() -> dict[str, Any]:
    size = _start_mpi().size
    from mpi4py import MPI

    MPI.Finalize()
    return {"size": size}


def _start_mpi() -> MPI.Intracomm:
    """Start MPI as training does, which may choose other transports than MPI by itself."""
    from kaitian_mpi.errors import UserError
    from kaitian_mpi.runtime.launcher import read_tasks, unlaunched
    from kaitian_mpi.runtime.lifecycle import initialize_mpi

    try:
        return initialize_mpi()
    except UserError as error:
        # Its ranks do not see each other, or it examines a machine of a larger allocation alone.
        if is_mpi_running() and (read_tasks(os.environ) or unlaunched(os.environ)):
            from mpi4py import MPI

            return MPI.COMM_WORLD
        sys.exit(str(error))


_EXAMINATIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "devices": _examine_devices,
    "run folder": _examine_storage,
    "mpi": _examine_mpi,
    "count": _count_ranks,
}

if __name__ == "__main__":
    main()
