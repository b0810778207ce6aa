"""No rank dies quietly, and none is left waiting for one that has died."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.runtime import shutdown, ulfm
from kaitian_mpi.runtime.launcher import read_launch

_PR_SET_PDEATHSIG = 1
_FORWARDING_SEC = 0.1
_RANK_0_SEC = 2.0
_COMMANDS = "OMPI_NUM_APP_CTX"  # how many different ones mpirun was given

_guarded = 0  # the process whose uncaught exceptions end the job


@contextmanager
def abort_guard(program: str) -> Iterator[None]:
    """End the whole job, with a reason, when this rank cannot go on.

    A `UserError` prints one line and ends with its exit code, 2 as a rule; any other exception
    prints its traceback, each line labelled `[rank@host]`, and ends with code 1; `sys.exit(n)`
    inside the block ends with code n, and even `sys.exit(0)` ends the job, because the other ranks
    would wait for this one. A process that is forked inside the block is no rank, and ends alone.
    """
    die_with_launcher()
    rank = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() == rank:
            _end_after(program, error)
        raise


def _end_after(program: str, error: BaseException) -> None:
    if isinstance(error, UserError):
        _end_after_user_error(program, error)
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        reason = "" if isinstance(error.code, int | None) else f": {error.code}"
        say(f"{label()} sys.exit({code}) before the run was complete{reason}; ending the job")
        end_job(code or 1)
    else:
        end_with_traceback()


@contextmanager
def told_once() -> Iterator[None]:
    """Let rank 0 alone tell a `UserError` that every rank finds in its command line.

    Needed before MPI has started, where the launcher does not end the other ranks when rank 0 ends.
    """
    try:
        yield
    except UserError as error:
        if os.environ.get(_COMMANDS) == "1" and ulfm.is_on():
            raise AgreedError(str(error)) from error
        raise


def guard_script() -> None:
    """Do the same for a script of the user's own: an uncaught exception ends the whole job.

    A plain `sys.exit` of one rank cannot be told from a good end here; `abort_guard` can.
    """
    global _guarded
    if sys.excepthook is sys.__excepthook__ and read_launch(os.environ).world_size > 1:
        sys.excepthook = _end_after_exception
        _guarded = os.getpid()
        die_with_launcher()


def _end_after_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if os.getpid() != _guarded:  # a forked process is no rank, and ends alone
        sys.__excepthook__(kind, error, trace)
        return
    say_labelled("".join(traceback.format_exception(kind, error, trace)))
    end_job(1)


def label() -> str:
    """Return this rank's label, `[rank@host]`."""
    return f"[{read_launch(os.environ).world_rank}@{socket.gethostname()}]"


def say(text: str) -> None:
    """Write whole lines to stderr at once, so that ranks do not cut into each other's lines."""
    sys.stdout.flush()
    os.write(2, (text.rstrip("\n") + "\n").encode())


def say_labelled(text: str) -> None:
    """Write lines to stderr at once, each labelled with this rank."""
    prefix = label()
    say("\n".join(f"{prefix} {line}" for line in text.splitlines()))


def end_with_traceback(what: str = "") -> None:
    """Say on which exception this rank ends, with its traceback, and end the job; no return."""
    say_labelled(what + traceback.format_exc())
    end_job(1)


def end_job(code: int) -> None:
    """End every rank of the job with this exit code; does not return."""
    if _mpi_is_running():
        from mpi4py import MPI

        # So that the launcher passes on the reason before what it has to say itself.
        time.sleep(_FORWARDING_SEC)
        if shutdown.listens():
            shutdown.end_all(code)
        MPI.COMM_WORLD.Abort(code)
    os._exit(code)


def _end_after_user_error(program: str, error: UserError) -> None:
    rank = read_launch(os.environ).world_rank
    started = _mpi_is_running()
    if not started and rank != 0:
        # Rank 0 finds the same, as a rule: it shall have the word before an exit ends the job.
        time.sleep(_RANK_0_SEC)
    if rank == 0 or not isinstance(error, AgreedError):
        say(f"{program}: error: {error}")
    if started and not isinstance(error, AgreedError):
        end_job(error.exit_code)
    # Here, as it imports numpy, and the watchdog, which imports us, starts before what is slow.
    from kaitian_mpi.runtime.lifecycle import leave_after_loss

    leave_after_loss(error.exit_code)
    sys.exit(error.exit_code)


def _mpi_is_running() -> bool:
    if "mpi4py.MPI" not in sys.modules:
        return False
    from mpi4py import MPI

    return MPI.Is_initialized() and not MPI.Is_finalized()


def die_with_launcher() -> None:
    """Ask the kernel for a SIGKILL when the launcher's process is gone (Linux).

    After a SIGKILL to mpirun, ranks that compute or sleep would live on.
    """
    if read_launch(os.environ).world_size == 1:
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
