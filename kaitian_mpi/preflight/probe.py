"""One examination in a process of its own; writes its facts to stdout as JSON.

python -P -m kaitian_mpi.preflight.probe NAME ARGUMENTS
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kaitian_mpi.preflight.facts import Storage
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
    facts = examine(sys.argv[1], json.loads(sys.argv[2]))
    with open(result, "w") as file:
        json.dump(facts, file)
    sys.stdout.flush()
    os._exit(0)  # a vendor's library may hang where it is unloaded


def examine(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that an examination finds."""
    if name == "run folder":
        return asdict(examine_storage(**arguments))
    if name == "devices":
        from kaitian_mpi.preflight.device_probe import examine_devices

        return asdict(examine_devices(**arguments))
    comm = _start_mpi()
    if name == "mpi":
        from kaitian_mpi.preflight.collect import collect_mpi

        return asdict(collect_mpi(comm))
    from mpi4py import MPI

    size = comm.size
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


def examine_storage(run_dir: str) -> Storage:
    """Write to the file system of a run folder, and leave nothing there."""
    folder = Path(run_dir).expanduser().absolute()
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    error, free = "", 0
    try:
        free = shutil.disk_usage(folder).free
        if not folder.is_dir():
            raise NotADirectoryError(0, "not a directory")
        # It has no name, or loses it at once: nothing stays if this process is killed.
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"\0")
            os.fsync(file.fileno())
    except OSError as failure:
        error = failure.strerror or str(failure)
    return Storage(folder=str(folder), free_bytes=free, error=error)


if __name__ == "__main__":
    main()
