"""Living on when a rank dies: MPI's user-level failure mitigation (ULFM), where it is switched on.

Source: Bland et al., "Post-failure recovery of MPI communication capability" (2013). MPI reports a
dead rank to those who talk to it; who hears of it revokes its communicators, so that nobody goes on
waiting in one for somebody who has left; then all that live agree and shrink.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from kaitian_mpi.runtime.launcher import FAULT_TOLERANCE
from kaitian_mpi.runtime.polling import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

    Comm = TypeVar("Comm", bound=MPI.Comm)

_LOOKING_SEC = 0.01

_tracked: list[MPI.Comm] = []
_shrunk = False


def is_on() -> bool:
    """Return whether the job was started so that it can live on without a rank."""
    return os.environ.get(FAULT_TOLERANCE) == "1"


def track(comm: Comm) -> Comm:
    """Let a communicator be revoked when a rank is lost; return it."""
    if is_on():
        _tracked.append(comm)
    return comm


def revoke_all() -> None:
    """Tell everybody who waits in a communicator of this rank that it is of no use any more.

    Not collective: the first who notices a loss calls it, and all others are told by MPI. May be
    called from any thread.
    """
    from mpi4py import MPI

    alive = [comm for comm in _tracked if comm != MPI.COMM_NULL]
    _tracked[:] = alive
    for comm in alive:
        if not comm.Is_revoked():
            comm.Revoke()


def is_revoked(comm: MPI.Comm) -> bool:
    """Return whether a communicator is of no use any more, so that nobody will come to meet in it.

    Not collective.
    """
    return is_on() and comm.Is_revoked()


def is_loss(error: BaseException) -> bool:
    """Return whether an error may say that a rank is lost, or that somebody else has noticed it.

    Any error of MPI may: when a rank dies in the middle of something, Open MPI's nonblocking
    collectives now and then report one that is not in its own list.
    """
    from mpi4py import MPI

    return is_on() and isinstance(error, MPI.Exception)


def may_have_lost_ranks(comm: MPI.Intracomm, seconds: float) -> bool:
    """Return whether a loss becomes known within some seconds. Not collective.

    For an error that may be the consequence of one: what a collective delivers may be mutilated
    before MPI reports the death of who sent it.
    """

    def is_known() -> bool:
        make_progress()
        return comm.Is_revoked() or comm.Get_failed().size > 0

    return is_on() and wait_until(is_known, seconds, _LOOKING_SEC)


def make_progress() -> None:
    """Let MPI take in what the other ranks have sent, such as a revocation."""
    from mpi4py import MPI

    MPI.COMM_SELF.Iprobe()


def agree(comm: MPI.Intracomm, well: bool) -> bool:
    """Return whether all went well on every rank and none is lost. Collective.

    The answer is the same on every rank that lives, whoever dies meanwhile; it comes even if the
    communicator has been revoked.
    """
    from mpi4py import MPI

    try:
        return bool(comm.Agree(int(well)))
    except MPI.Exception as error:
        if error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
            return False
        raise


def shrink(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the ranks of `comm` that live, in the same order. Collective."""
    global _shrunk
    _shrunk = True
    return cast("MPI.Intracomm", comm.Shrink())


def has_shrunk() -> bool:
    """Return whether this process has lived through the loss of a rank."""
    return _shrunk


def are_lost(comm: MPI.Intracomm, ranks: Sequence[int]) -> bool:
    """Return whether all these ranks of `comm` are known to be dead. Not collective."""
    from mpi4py import MPI

    dead = comm.Get_failed()
    places = MPI.Group.Translate_ranks(comm.group, list(ranks), dead)
    return MPI.UNDEFINED not in places
