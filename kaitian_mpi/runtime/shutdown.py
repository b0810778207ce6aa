"""Ends the whole job under ULFM, where the launcher keeps it running when a rank dies.

There `MPI_Abort` ends only the rank that calls it, without notifying the others: Open MPI treats
only a rank killed by a signal as failed. So a rank that ends the job notifies the others itself.
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

_POLL_SEC = 0.2
_DELIVERY_SEC = 2.0

_comm: MPI.Intracomm | None = None


def is_listening() -> bool:
    """Return whether this rank listens for a shutdown message."""
    return _comm is not None


def start_listening(world: MPI.Intracomm) -> Callable[[], None]:
    """Exit this process as soon as another rank ends the job. Collective over all ranks.

    Returns:
        A function that stops listening; to be called before MPI is finalized.
    """
    global _comm
    _comm = world.Dup()
    stop = threading.Event()
    listener = threading.Thread(
        target=_listen, args=(_comm, stop), name="kaitian-shutdown", daemon=True
    )
    listener.start()

    def close() -> None:
        stop.set()
        listener.join()

    return close


def exit_all_ranks(code: int) -> None:
    """Make every rank exit with this code; does not return.

    A rank that does not receive the message within 2 s, because it is stopped or a call holds the
    GIL, is killed by the launcher.
    """
    from mpi4py import MPI

    assert _comm is not None
    code = code & 255 or 1
    others = [rank for rank in range(_comm.size) if rank != _comm.rank]
    # Synchronous sends complete only when the message has been received.
    pending = [_comm.Issend([bytes([code]), MPI.BYTE], rank, tags.SHUTDOWN) for rank in others]

    def all_received() -> bool:
        nonlocal pending
        pending = [request for request in pending if not _is_done(request)]
        return not pending

    wait_until(all_received, _DELIVERY_SEC, _POLL_SEC / 10)
    # The launcher may treat the first exit as the end of the job and kill ranks still exiting.
    time.sleep(2 * _POLL_SEC)
    if pending:
        os.kill(os.getppid(), signal.SIGTERM)
    os._exit(code)


def _is_done(request: MPI.Request) -> bool:
    from mpi4py import MPI

    try:
        return request.Test()
    except MPI.Exception:  # its receiver is dead
        return True


def _listen(comm: MPI.Intracomm, stop: threading.Event) -> None:
    from mpi4py import MPI

    code = bytearray(1)
    while not stop.wait(_POLL_SEC):
        try:
            if comm.Iprobe(MPI.ANY_SOURCE, tags.SHUTDOWN):
                comm.Recv([code, MPI.BYTE], MPI.ANY_SOURCE, tags.SHUTDOWN)
                os._exit(code[0])
        except MPI.Exception:  # a rank is lost: the others may still end the job
            comm.Ack_failed()
