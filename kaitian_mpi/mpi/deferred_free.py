"""Frees the communicators of destroyed groups once every rank has destroyed them.

Destroying a group does not block, so ranks may destroy their groups in any order, one may destroy a
group that others keep, and none hangs because of another. A communicator may be freed only when
every rank is done with it. So each rank starts a nonblocking barrier and tests it when it next
creates or destroys a group. A communicator that some rank keeps until the end is never freed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kaitian_mpi.runtime.polling import keep_alive
from kaitian_mpi.runtime.ulfm import may_be_loss

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.mpi.topology import GroupComms

_lock = threading.Lock()
_waiting: list[tuple[MPI.Request, GroupComms]] = []


def free_when_unused(comms: GroupComms) -> None:
    """Free communicators once every rank has called this for them. Does not block."""
    from mpi4py import MPI

    free_unused_comms()
    try:
        request = comms.messages.Ibarrier()
    except MPI.Exception as error:
        if not may_be_loss(error):
            raise
        return
    with _lock:
        _waiting.append((request, comms))


def free_unused_comms() -> None:
    """Free the communicators that no rank uses any more. Not collective, does not block."""
    with _lock:
        _waiting[:] = [(request, comms) for request, comms in _waiting if _is_kept(request, comms)]


def _is_kept(request: MPI.Request, comms: GroupComms) -> bool:
    from mpi4py import MPI

    try:
        if not request.Test():
            return True
    except MPI.Exception as error:
        if not may_be_loss(error):
            raise
        keep_alive(request, comms)
        return False
    comms.free()
    return False
