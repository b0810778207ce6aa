"""Initializes and finalizes MPI."""

from __future__ import annotations

import atexit
import math
import multiprocessing.process
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.runtime import RANK_VARIABLE, launcher, ulfm
from kaitian_mpi.runtime.mpi_libraries import JOB_NAME, OPEN_MPI, launched_by, mpirun_address
from kaitian_mpi.runtime.polling import reduce_timer_slack
from kaitian_mpi.runtime.system import ancestor_named, usable_cores

if TYPE_CHECKING:
    from mpi4py import MPI

_WATCH_ENDS_SEC = 1.0
START_LIMIT_VARIABLE = "KAITIAN_START_TIMEOUT"
_START_LIMIT_SEC = 600.0

_start_watch: subprocess.Popen[bytes] | None = None
# Pairs of (ends_work, close), called from the last to the first.
_closers: list[tuple[bool, Callable[[], None]]] = []
_finalize_mpi: Callable[[], None] | None = None  # mpi4py's own, if only `_finalize` calls it
# A forked child must not close the parent's threads and its connections to other ranks.
os.register_at_fork(after_in_child=_closers.clear)


def initialize_mpi() -> MPI.Intracomm:
    """Initialize MPI, with its environment, once; return `COMM_WORLD`. Collective at first."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise UserError(
            "the script was imported again by a data-loading process, and started to train there; "
            'put the training under if __name__ == "__main__":, or set workers=0'
        )
    os.environ[RANK_VARIABLE] = "1"
    launch = launcher.read_launch(os.environ)
    reduce_timer_slack()
    launcher.prepare_environment(os.environ, launch, len(usable_cores()))
    try:
        takes_over = _take_over_finalize()
        watch_start()
        with _ended_by_signals():
            from mpi4py import MPI
        if takes_over:
            _postpone_finalize()
        end_start_watch()
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"no usable MPI library ({error}); install one with "
            'pip install "kaitian-mpi[mpi]", or load the module of this system\'s MPI'
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UserError(
            "MPI was initialized without MPI_THREAD_MULTIPLE; import kaitian_mpi before mpi4py, or "
            "leave mpi4py.rc.threads and mpi4py.rc.thread_level at their defaults"
        )
    size = MPI.COMM_WORLD.size
    library = MPI.get_vendor()[0]
    by_srun = launcher.is_from_srun(os.environ)
    fault = launcher.different_mpi(launch.world_size, size, library, by_srun)
    if fault or (size == 1 and (fault := launcher.unlaunched(os.environ))):
        raise AgreedError("; ".join(fault))  # the environment is the same on all ranks
    if ulfm.is_enabled() and not ulfm.is_listening():
        register_close(ulfm.start_listening(MPI.COMM_WORLD))
    return MPI.COMM_WORLD


def watch_start() -> None:
    """With Open MPI, start a process that ends the job if a local rank ends before MPI starts."""
    global _start_watch
    launch = launcher.read_launch(os.environ)
    parent = None
    if launch.world_size > 1 and launched_by(os.environ) is OPEN_MPI and JOB_NAME in os.environ:
        parent = ancestor_named(OPEN_MPI.processes)
    if parent is None or _start_watch is not None or is_mpi_running():
        return
    script = Path(__file__).absolute().with_name("start_watch_process.py")
    prefix = f"[{launch.world_rank}@{socket.gethostname()}]"
    processes = [str(os.getpid()), str(parent)]
    limit = f"{START_LIMIT_VARIABLE}={start_limit(os.environ)}"
    query = [limit, mpirun_address(os.environ), OPEN_MPI.joining]
    names = [JOB_NAME, *OPEN_MPI.rank_variables]
    with suppress(OSError):
        _start_watch = subprocess.Popen(  # noqa: S603  # our own file, no shell
            [sys.executable, "-I", "-S", str(script), prefix, *processes, *query, *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )


def start_limit(environ: Mapping[str, str]) -> float:
    """Return the seconds to wait for ranks of unknown state; 0: forever."""
    text = environ.get(START_LIMIT_VARIABLE, "").strip()
    limit_sec = _START_LIMIT_SEC
    if text:
        with suppress(ValueError):
            limit_sec = float(text)
            if 0 <= limit_sec < math.inf:
                return limit_sec
        raise UserError(
            f"{START_LIMIT_VARIABLE} must be a number of seconds (0: no limit), not {text!r}"
        )
    return limit_sec


def end_start_watch() -> None:
    """Tell the process of `watch_start` that MPI has started, or is not needed."""
    global _start_watch
    watch = _start_watch
    _start_watch = None
    if watch is not None and watch.stdin is not None:
        with suppress(OSError):
            watch.stdin.write(b"1")
            watch.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            watch.wait(_WATCH_ENDS_SEC)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM end this process while MPI starts: MPICH waits for other ranks."""
    library = launched_by(os.environ)
    handlers: dict[signal.Signals, Any] = {}
    in_main_thread = threading.current_thread() is threading.main_thread()
    if library is not None and not library.kills_soon and in_main_thread:
        stops = (signal.SIGINT, signal.SIGTERM)
        handlers = {
            stop: signal.signal(stop, signal.SIG_DFL)
            for stop in stops
            if signal.getsignal(stop) not in (None, signal.SIG_IGN)
        }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _take_over_finalize() -> bool:
    """Finalize MPI when this process exits; mpi4py would also do it in forks, and hang.

    Returns whether mpi4py has not decided it.
    """
    import mpi4py

    if "mpi4py.MPI" in sys.modules or mpi4py.rc.finalize is not None:
        return False
    mpi4py.rc.finalize = False
    # Registered before everything that uses MPI, so it is called last.
    atexit.register(_finalize, os.getpid())
    return True


def _postpone_finalize() -> None:
    """Let a script's own `MPI.Finalize()` do nothing yet: threads, and what ends it, use MPI."""
    global _finalize_mpi
    from mpi4py import MPI

    _finalize_mpi = MPI.Finalize
    MPI.Finalize = lambda: None


def _finalize(pid: int) -> None:
    # After a loss, MPI_Finalize may wait for the dead ranks.
    if os.getpid() != pid or not is_mpi_running() or ulfm.has_survived_loss():
        return
    from mpi4py import MPI

    if not ulfm.is_enabled() or ulfm.are_all_alive(MPI.COMM_WORLD):
        (_finalize_mpi or MPI.Finalize)()


def is_mpi_running() -> bool:
    """Return whether MPI is initialized, and not finalized."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    from mpi4py import MPI

    return MPI.Is_initialized() and not MPI.Is_finalized()


def register_close(close: Callable[[], None], *, ends_work: bool = False) -> None:
    """Register `close` to be called before MPI is finalized, last registered first.

    For threads: one still inside MPI when the interpreter exits aborts the process. A callback with
    `ends_work` still communicates through the others' resources, so it is called first.
    """
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    _closers.append((ends_work, close))
    _closers.sort(key=lambda entry: entry[0])  # stable


def unregister_close(close: Callable[[], None]) -> None:
    """Undo `register_close`: `close` has already been called."""
    _closers[:] = [entry for entry in _closers if entry[1] != close]


def _close_all() -> None:
    try:
        while _closers:
            _closers.pop()[1]()
    finally:
        if _closers:  # a callback has failed
            _close_all()


def exit_after_loss(code: int = 0) -> None:
    """Exit with this code if the job has lost a rank: MPI_Finalize would wait for the dead."""
    if ulfm.has_survived_loss():
        _close_all()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the stream is closed, or its disk is full
                stream.flush()
        os._exit(code)
