"""Abort handling: when a rank fails, report the reason and end the job, which would wait for it."""

from __future__ import annotations

import fcntl
import functools
import os
import signal
import socket
import stat
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.launcher import END_TOKEN, end_line, read_launch
from kaitian_mpi.runtime.lifecycle import (
    end_start_watch,
    exit_after_loss,
    is_mpi_running,
    watch_start,
)
from kaitian_mpi.runtime.mpi_libraries import APP_CONTEXTS, end_job_before_mpi, report_to_launcher
from kaitian_mpi.runtime.system import die_with_parent

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_READ_OUTPUT_SEC = 2.0
_FORWARD_OUTPUT_SEC = 0.1
_WAIT_FOR_RANK_0_SEC = 2.0
_WAIT_FOR_SPEAKER_SEC = 1.0


@contextmanager
def abort_on_error(program: str) -> Iterator[None]:
    """Abort the whole job, with a message, when the block raises on this rank.

    A `UserError` prints one line and gives its exit code, `sys.exit(n)` gives n, anything else a
    traceback and 1. Even `sys.exit(0)` ends the job, because the other ranks would wait.
    """
    die_with_launcher()
    report_to_launcher(os.environ)
    watch_start()
    rank_pid = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() == rank_pid:
            _abort_on(program, error)
        raise
    end_start_watch()


def _abort_on(program: str, error: BaseException, hook: _Hook | None = None) -> None:
    if isinstance(error, UserError):
        is_agreed = isinstance(error, AgreedError)
        if (not is_mpi_running() or (hook and not is_agreed)) and not _speaks_first():
            # Rank 0 usually has the same error, and its exit ends the job.
            time.sleep(_WAIT_FOR_RANK_0_SEC)
        if _speaks_first() or not is_agreed:
            print_to_stderr(f"{program}: error: {error}")
        elif ulfm.has_survived_loss():
            # MPI_Finalize, in which ranks wait for each other, is left out: the launcher may take
            # the first exit for the end of the job, before the line of the rank that speaks.
            time.sleep(_WAIT_FOR_SPEAKER_SEC)
        if read_launch(os.environ).world_size > 1 and not is_agreed:
            _end_other_ranks(error.exit_code)
        exit_after_loss(error.exit_code)
        sys.exit(error.exit_code)
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        with suppress(Exception):  # not every object can be shown
            reason = "" if isinstance(error.code, int | None) else f": {error.code}"
            text = f"sys.exit({code:d}) before the run was complete{reason}; ending the job"
            print_to_stderr(f"{rank_prefix()} {text}")
        abort_job(code)
    else:
        _show(hook or sys.excepthook, error)
        abort_job(1)


@contextmanager
def report_once() -> Iterator[None]:
    """Print a `UserError` about the command line on rank 0 only, also under ULFM."""
    try:
        yield
    except UserError as error:
        if os.environ.get(APP_CONTEXTS) == "1" and ulfm.is_enabled():
            raise AgreedError(str(error)) from error
        raise


@functools.cache
def install_abort_hook() -> None:
    """Make an uncaught exception abort the job, for user scripts without `abort_on_error`."""
    hook = sys.excepthook = _AbortHook(sys.excepthook)
    # Called before `atexit` callbacks and before threads are joined: both may wait for other ranks.
    threading._register_atexit(hook.abort_if_replaced)  # type: ignore[attr-defined]
    die_with_launcher()


class _AbortHook:
    """An exception hook that calls the previous hook, then aborts the job."""

    def __init__(self, before: _Hook) -> None:
        self._before = before
        self._pid = os.getpid()
        self._is_called = False

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._is_called = True
        is_rank = os.getpid() == self._pid  # a forked process is not a rank, and exits alone
        is_alone = read_launch(os.environ).world_size == 1
        if not is_rank or (is_alone and not isinstance(error, UserError)):
            self._before(kind, error, trace)
            return
        _abort_on(Path(sys.argv[0]).name or "python", error, self._before)

    def abort_if_replaced(self) -> None:
        """Abort the job if this process exits by an exception that the script's hook handled."""
        error = getattr(sys, "last_value", None)
        trace = getattr(error, "__traceback__", None)
        # Other code sets `last_value` as well, such as pytest for each failed test.
        outermost = "" if trace is None else trace.tb_frame.f_globals.get("__name__")
        if self._is_called or outermost not in ("__main__", "runpy"):
            return
        if os.getpid() == self._pid and read_launch(os.environ).world_size > 1:
            print_to_stderr(f"{rank_prefix()} {type(error).__name__} on this rank; ending the job")
            abort_job(error.exit_code if isinstance(error, UserError) else 1)


def _show(hook: _Hook, error: BaseException) -> None:
    """Show an exception with the script's own hook, or as a traceback with labeled lines."""
    text = "".join(traceback.format_exception(error))
    # torch's own hook shows a traceback as well.
    if hook is not sys.__excepthook__ and not getattr(hook, "__module__", "").startswith("torch"):
        try:
            hook(type(error), error, error.__traceback__)
        except BaseException as failure:  # it must not keep the job from ending
            text += f"the script's sys.excepthook failed: {failure!r}"
        else:
            return
    write_labeled(text)


def rank_prefix() -> str:
    """Return this rank's message prefix, `[rank@host]`."""
    return f"[{read_launch(os.environ).world_rank}@{socket.gethostname()}]"


def print_to_stderr(text: str) -> None:
    """Write whole lines to stderr in one call, so that lines of ranks do not mix; never raises."""
    with suppress(Exception):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, (text.rstrip("\n") + "\n").encode(errors="backslashreplace"))


def report_end() -> None:
    """Tell the command that has started mpirun, if any, that this rank's work is done."""
    if token := os.environ.get(END_TOKEN):
        print_to_stderr(end_line(token))


def write_labeled(text: str) -> None:
    """Write lines to stderr in one call, each prefixed `[rank@host]`."""
    prefix = rank_prefix()
    print_to_stderr("\n".join(f"{prefix} {line}" for line in text.splitlines()))


def abort_with_traceback(prefix: str = "") -> None:
    """Print the current exception's traceback, after `prefix`, and abort; does not return."""
    write_labeled(prefix + traceback.format_exc())
    abort_job(1)


def abort_job(code: int) -> None:
    """End every rank of the job with this exit code, or 1 if it would be 0; does not return."""
    code = code & 255 or 1  # the system keeps the low 8 bits
    _end_other_ranks(code)
    os._exit(code)


def _end_other_ranks(code: int) -> None:
    """End the job; returns if the launcher will end it when this rank exits, before MPI starts."""
    # Wait until the launcher has read this process's output, which MPICH's would otherwise drop.
    give_up = time.monotonic() + _READ_OUTPUT_SEC
    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(2).st_mode):
            while any(fcntl.ioctl(2, termios.FIONREAD, bytes(4))) and time.monotonic() < give_up:
                time.sleep(0.005)
    time.sleep(_FORWARD_OUTPUT_SEC)
    if is_mpi_running():
        from mpi4py import MPI

        if ulfm.is_listening():
            ulfm.exit_all_ranks(code)
        MPI.COMM_WORLD.Abort(code)
    end_job_before_mpi(os.environ, code)


def _speaks_first() -> bool:
    """Return whether this rank prints messages common to all: rank 0, or the lowest living rank."""
    first = ulfm.first_living_rank() if is_mpi_running() else 0
    return read_launch(os.environ).world_rank == first


def die_with_launcher() -> None:
    """Make the kernel send SIGKILL to this process when the launcher exits (Linux)."""
    if read_launch(os.environ).world_size > 1:
        die_with_parent(signal.SIGKILL)
