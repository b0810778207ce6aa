"""Ending the whole job where the launcher was told that it lives on when a rank dies.

There `MPI_Abort` ends the rank that calls it, and the others hear nothing of it: to Open MPI only
a rank that dies by a signal is lost. So a rank that ends the job tells the others itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.polling import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

_LOOKING_SEC = 0.2
_ENDING_SEC = 2.0

_comm: MPI.Intracomm | None = None


def listens() -> bool:
    """Return whether the ranks listen to each other."""
    return _comm is not None


def listen(world: MPI.Intracomm) -> Callable[[], None]:
    """End this process as soon as another rank says that the job ends. Collective over all ranks.

    Returns:
        What ends the listening; to be called before MPI is finalized.
    """
    global _comm
    _comm = world.Dup()
    stop = threading.Event()
    listener = threading.Thread(
        target=_listen, args=(_comm, stop), name="kaitian-ending", daemon=True
    )
    listener.start()

    def close() -> None:
        stop.set()
        listener.join()

    return close


def end_all(code: int) -> None:
    """End every rank with this exit code; does not return.

    Whoever does not hear of it within 2 s, since it is stopped or in the middle of something that
    keeps Python's lock, is ended by the launcher.
    """
    from mpi4py import MPI

    assert _comm is not None
    code = code & 255 or 1
    others = [rank for rank in range(_comm.size) if rank != _comm.rank]
    # Synchronous: it is over when the other has heard.
    unheard = [_comm.Issend([bytes([code]), MPI.BYTE], rank, tags.SHUTDOWN) for rank in others]

    def all_heard() -> bool:
        nonlocal unheard
        unheard = [request for request in unheard if not _is_over(request)]
        return not unheard

    wait_until(all_heard, _ENDING_SEC, _LOOKING_SEC / 10)
    # The launcher may take the first exit for the end of the job, and kill who has not heard yet.
    time.sleep(2 * _LOOKING_SEC)
    if unheard:
        os.kill(os.getppid(), signal.SIGTERM)
    os._exit(code)


def _is_over(request: MPI.Request) -> bool:
    from mpi4py import MPI

    try:
        return request.Test()
    except MPI.Exception:  # it was for a rank that is dead
        return True


def _listen(comm: MPI.Intracomm, stop: threading.Event) -> None:
    from mpi4py import MPI

    code = bytearray(1)
    while not stop.wait(_LOOKING_SEC):
        try:
            if comm.Iprobe(MPI.ANY_SOURCE, tags.SHUTDOWN):
                comm.Recv([code, MPI.BYTE], MPI.ANY_SOURCE, tags.SHUTDOWN)
                os._exit(code[0])
        except MPI.Exception:  # a rank is lost: the others may still have something to say
            comm.Ack_failed()
