"""Communicators that this rank uses no more, given back to MPI once no other rank does.

A rank that ends a group waits for nobody, so the ranks may end their groups in any order, one may
end a group that others keep, and none hangs for another's sake. MPI may have a communicator back
only when every rank is done with it; so each starts a nonblocking barrier, and looks for its end
when it next makes or ends a group. What another rank keeps until the end stays with MPI.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kaitian_mpi.runtime.polling import abandon
from kaitian_mpi.runtime.ulfm import is_loss

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.mpi.topology import GroupComms

_lock = threading.Lock()
_retired: list[tuple[MPI.Request, GroupComms]] = []


def retire(comms: GroupComms) -> None:
    """Have communicators freed when every rank has retired them. Waits for nobody."""
    from mpi4py import MPI

    free_retired()
    try:
        request = comms.messages.Ibarrier()
    except MPI.Exception as error:
        if not is_loss(error):
            raise
        return
    with _lock:
        _retired.append((request, comms))


def free_retired() -> None:
    """Free what every rank has retired by now. Not collective: freeing waits for nobody."""
    with _lock:
        _retired[:] = [(request, comms) for request, comms in _retired if _is_kept(request, comms)]


def _is_kept(request: MPI.Request, comms: GroupComms) -> bool:
    from mpi4py import MPI

    try:
        if not request.Test():
            return True
    except MPI.Exception as error:
        if not is_loss(error):
            raise
        abandon(request, comms)
        return False
    comms.free()
    return False
