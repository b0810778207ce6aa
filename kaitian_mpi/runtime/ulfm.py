"""MPI's user-level failure mitigation (ULFM): the job survives the death of a rank, if enabled.

Source: Bland et al., "Post-failure recovery of MPI communication capability" (2013). A rank to
which MPI reports a dead one revokes its communicators; then the survivors agree and shrink.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, cast

from kaitian_mpi.errors import RankLostError
from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.mpi_libraries import survival_requested
from kaitian_mpi.runtime.polling import wait_request, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

    Comm = TypeVar("Comm", bound=MPI.Comm)

_POLL_SEC = 0.01
_LISTEN_SEC = 0.2
_DELIVERY_SEC = 2.0

# The values that ranks pass to an agreement, and the outcome of a damaged value.
_NO = 1
_YES = 3
_UNREADABLE = 0

_endings: MPI.Intracomm | None = None  # for messages with which a rank ends the job
_tracked: list[MPI.Comm] = []
_shrunk = False


def is_enabled() -> bool:
    """Return whether the job was started with `mpirun --with-ft ulfm`."""
    return survival_requested(os.environ)


def track_comm(comm: Comm) -> Comm:
    """Register a communicator to be revoked when a rank is lost; return it."""
    if is_enabled():
        _tracked.append(comm)
    return comm


def revoke_all() -> None:
    """Revoke all tracked communicators: ranks waiting in them get an error. Not collective."""
    alive = [comm for comm in _tracked if comm]  # not freed
    _tracked[:] = alive
    for comm in alive:
        if not comm.Is_revoked():
            comm.Revoke()


def is_revoked(comm: MPI.Comm) -> bool:
    """Return whether a communicator has been revoked and can no longer be used. Not collective."""
    return is_enabled() and comm.Is_revoked()


def may_be_loss(error: BaseException) -> bool:
    """Return whether an error may mean that a rank is lost: any MPI error may."""
    from mpi4py import MPI

    return is_enabled() and isinstance(error, MPI.Exception)


@contextmanager
def tolerating_loss() -> Iterator[None]:
    """Suppress an error in the block that may mean that a rank is lost."""
    try:
        yield
    except Exception as error:
        if not (isinstance(error, RankLostError) or may_be_loss(error)):
            raise


def loss_detected_within(comm: MPI.Intracomm, seconds: float) -> bool:
    """Return whether a loss is detected in time; before, collectives may return corrupt data."""
    return is_enabled() and wait_until(lambda: is_loss_detected(comm), seconds, _POLL_SEC)


def is_loss_detected(comm: MPI.Intracomm) -> bool:
    """Return whether a rank of `comm` is lost or has noticed a loss, with fault tolerance."""
    make_progress()
    return comm.Is_revoked() or comm.Get_failed().size > 0


def lost_ranks(comm: MPI.Comm) -> list[int]:
    """Return the ranks of `comm` that are known to be dead. Not collective."""
    return comm.Get_failed().Translate_ranks(group=comm.group)


def make_progress() -> None:
    """Let MPI make progress, i.e. process incoming messages such as a revocation."""
    from mpi4py import MPI

    MPI.COMM_SELF.Iprobe()


def agree(comm: MPI.Intracomm, ok: bool) -> bool:
    """Return whether every rank passed True and none is lost, the same on all. Collective.

    Raises:
        RuntimeError: MPI has damaged the outcome on its way to this rank. The rank cannot
            continue, because the others may have read it.
    """
    from mpi4py import MPI

    outcome = _UNREADABLE
    while outcome == _UNREADABLE:
        try:
            outcome = _agree_once(comm, _YES if ok else _NO)
        except MPI.Exception as error:
            if error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
                return False
            raise
    if not ok:
        return False  # whatever the others have passed
    if outcome not in (_NO, _YES):
        raise RuntimeError(
            "MPI has damaged the outcome of an agreement between ranks; start the job again"
        )
    return outcome == _YES


def are_all_alive(comm: MPI.Intracomm) -> bool:
    """Return whether every rank of `comm` is there when all that are left call this. Collective.

    The answer is the same on all of them, but for those that knew of a loss before: these do not
    wait for the others, which learn of it from the end of these.
    """
    return not is_loss_detected(comm) and agree(comm, True)


def _agree_once(comm: MPI.Intracomm, value: int) -> int:
    """Return the ranks' values combined by a bitwise and. Collective.

    Open MPI (5.0.11) damages an agreement's message that one thread of a process receives while
    another one enters the agreement: its value becomes half of an address, whose lowest bits are 0.
    A value that is damaged on its way to rank 0 makes the outcome `_UNREADABLE`, on every rank. An
    outcome is not damaged on its way back: rank 0, which decides it, is the last to enter.
    """
    if comm.rank == 0:
        _wait_for_others(comm)
        outcome = array("i", [value])
        wait_request(comm.Iagree(outcome))
        return outcome[0]
    outcome = array("i", [value])
    request = comm.Iagree(outcome)
    _wait_for_others(comm)
    with tolerating_loss():
        comm.Isend(b"", _parent(comm.rank), tags.AGREEMENT).Free()  # it has no buffer to keep
    wait_request(request)
    return outcome[0]


def _wait_for_others(comm: MPI.Intracomm) -> None:
    """Wait until all below this rank that are left have entered an agreement.

    The ranks are a binomial tree, as in MPI's own collectives: a thousand of them send rank 0 ten
    messages. What a dead rank should have passed on is not waited for.
    """
    requests = []
    for rank in _children(comm.rank, comm.size):
        with tolerating_loss():
            requests.append(comm.Irecv(bytearray(), rank, tags.AGREEMENT))
    for request in requests:
        with tolerating_loss():
            wait_request(request)


def _parent(rank: int) -> int:
    """Return the rank without its lowest bit."""
    return rank & (rank - 1)


def _children(rank: int, size: int) -> Iterator[int]:
    """Yield the ranks of which this one is the parent."""
    step = 1
    while rank + step < size and not rank & step:
        yield rank + step
        step *= 2


def shrink(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the surviving ranks of `comm`, in the same order. Collective."""
    global _shrunk
    _shrunk = True
    return cast("MPI.Intracomm", comm.Shrink())


def has_survived_loss() -> bool:
    """Return whether this process has survived the loss of a rank."""
    return _shrunk


def have_failed(comm: MPI.Intracomm, ranks: Iterable[int]) -> bool:
    """Return whether all these ranks of `comm` are known to be dead. Not collective."""
    return set(ranks) <= set(lost_ranks(comm))


def first_living_rank() -> int:
    """Return the lowest rank of MPI's world that is not known to be dead. Not collective."""
    from mpi4py import MPI

    if not is_enabled():
        return 0
    return min(set(range(MPI.COMM_WORLD.size)).difference(lost_ranks(MPI.COMM_WORLD)))


def is_listening() -> bool:
    """Return whether this rank listens for a message that ends the job."""
    return _endings is not None


def start_listening(world: MPI.Intracomm) -> Callable[[], None]:
    """Exit as soon as another rank ends the job; return a function that stops this. Collective."""
    global _endings
    from mpi4py import MPI

    comm = _endings = world.Dup()
    stop = threading.Event()

    def listen() -> None:
        code = bytearray(1)
        while not stop.wait(_LISTEN_SEC):
            try:
                if comm.Iprobe(MPI.ANY_SOURCE, tags.SHUTDOWN):
                    comm.Recv(code, MPI.ANY_SOURCE, tags.SHUTDOWN)
                    os._exit(code[0])
            except MPI.Exception:  # a rank is lost, but others may still end the job
                comm.Ack_failed()

    def close() -> None:
        stop.set()
        listener.join()

    listener = threading.Thread(target=listen, name="kaitian-shutdown", daemon=True)
    listener.start()
    return close


def exit_all_ranks(code: int) -> None:
    """Make every rank that listens exit with this code, from 1 to 255; does not return."""
    assert _endings is not None
    comm = _endings
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    # Synchronous sends complete only when the message has been received.
    pending = [comm.Issend(bytes([code]), rank, tags.SHUTDOWN) for rank in others]

    def all_received() -> bool:
        pending[:] = [request for request in pending if not is_done(request)]
        return not pending

    wait_until(all_received, _DELIVERY_SEC, _LISTEN_SEC / 10)
    # The launcher may treat the first exit as the end of the job and kill ranks still exiting.
    time.sleep(2 * _LISTEN_SEC)
    if pending:
        os.kill(os.getppid(), signal.SIGTERM)
    os._exit(code)


def is_done(request: MPI.Request) -> bool:
    """Return whether a send has ended: the message was received, or its receiver may be dead."""
    with tolerating_loss():
        return request.Test()
    return True
