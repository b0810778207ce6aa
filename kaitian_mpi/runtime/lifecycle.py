"""Starting and ending MPI."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime import shutdown, ulfm
from kaitian_mpi.runtime.launcher import prepare_environment, read_launch, usable_cores
from kaitian_mpi.runtime.polling import shorten_naps

if TYPE_CHECKING:
    from mpi4py import MPI

_closers: list[Callable[[], None]] = []
# What is to be closed is the parent's: its threads, and its connections with other ranks.
os.register_at_fork(after_in_child=_closers.clear)


def start_mpi() -> MPI.Intracomm:
    """Start MPI where it is not running yet and return `COMM_WORLD`.

    Settings that must come before MPI are made here. Collective over all ranks, the first time.

    Raises:
        UserError: mpi4py cannot load an MPI library, somebody started MPI without
            `MPI_THREAD_MULTIPLE`, or a launcher started copies that do not see each other.
    """
    launch = read_launch(os.environ)
    shorten_naps()
    prepare_environment(os.environ, launch, usable_cores())
    try:
        _leave_finalizing_to_us()
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"found no usable MPI library ({error}); install one with "
            'pip install "kaitian-mpi[mpi]", or load the one of this machine'
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UserError(
            "MPI was started without MPI_THREAD_MULTIPLE; import kaitian_mpi before mpi4py, or "
            "leave mpi4py.rc.threads and mpi4py.rc.thread_level alone"
        )
    if launch.world_size > MPI.COMM_WORLD.size:
        raise UserError(
            f"the launcher started {launch.world_size} ranks, but MPI sees {MPI.COMM_WORLD.size}; "
            "mpirun and mpi4py belong to different MPIs: use the mpirun of this environment"
        )
    if ulfm.is_on() and not shutdown.listens():
        close_at_exit(shutdown.listen(MPI.COMM_WORLD))
    return MPI.COMM_WORLD


def _leave_finalizing_to_us() -> None:
    """Have MPI finalized when this process ends, but not by processes forked from it.

    mpi4py would finalize it in them as well, and that hangs.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules and mpi4py.rc.finalize is None:
        mpi4py.rc.finalize = False
        # Registered before all that uses MPI, and so called after it.
        atexit.register(_finalize, os.getpid())


def _finalize(process: int) -> None:
    if os.getpid() != process or "mpi4py.MPI" not in sys.modules:
        return
    from mpi4py import MPI

    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def close_at_exit(close: Callable[[], None]) -> None:
    """Call `close` before MPI is finalized; the last registered is called first.

    A thread still inside MPI when the interpreter ends aborts the process, so whoever starts one
    registers here how to stop it.
    """
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    _closers.append(close)


def closed_early(close: Callable[[], None]) -> None:
    """Take back what `close_at_exit` was told: it has been closed."""
    if close in _closers:
        _closers.remove(close)


def _close_all() -> None:
    while _closers:
        _closers.pop()()


def leave_after_loss(code: int = 0) -> None:
    """End this process with this exit code if its job has lost a rank; otherwise do nothing.

    MPI's own end waits, across hosts, for ranks that are dead.
    """
    if ulfm.has_shrunk():
        _close_all()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
