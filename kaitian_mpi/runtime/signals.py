"""Signal handling: save and exit, or write a checkpoint and continue.

On SIGTERM or Ctrl-C, Open MPI's mpirun sends its ranks SIGTERM, and SIGKILL 0.25 s later or as soon
as a rank has exited. Work that takes longer is done by a process in its own session.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NamedTuple

from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.abort import print_to_stderr
from kaitian_mpi.runtime.launcher import read_launch
from kaitian_mpi.runtime.mpi_libraries import launched_by
from kaitian_mpi.runtime.system import launcher_pid

CHECKPOINT_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that request a checkpoint; the job then continues, or ends after the second one."""

_OTHERS_SAVING_SEC = 2.0
_REASONS: dict[int, str] = {
    signal.SIGINT: "interrupted by Ctrl-C",
    # mpirun sends SIGTERM for several reasons, without saying which.
    signal.SIGTERM: "terminated by SIGTERM (Ctrl-C, a time limit, or another rank's failure)",
}

_program = ""


class _Exit(NamedTuple):
    """The arguments of `on_exit_signal`."""

    callback: Callable[[], str | None]
    in_main_thread: Callable[[], None] | None
    reports: bool | None


# The blocks that this process is in, the innermost last.
_exits: list[_Exit] = []
_requests: list[Callable[[bool], None]] = []
_unanswered: deque[bool] = deque()  # requests not yet passed to a block


@contextmanager
def on_exit_signal(
    callback: Callable[[], str | None],
    in_main_thread: Callable[[], None] | None = None,
    *,
    reports: bool | None = None,
) -> Iterator[None]:
    """Call `callback` before a signal ends this process inside the block; print its result.

    The callback has 0.25 s, in its own thread, while `in_main_thread` runs in the main thread. It
    returns None to print nothing, and "" if another rank may be saving. The rank with `reports`
    prints that the job ends; None: rank 0.
    """
    _exits.append(_Exit(callback, in_main_thread, reports))
    try:
        yield
    finally:
        _exits.pop()


@contextmanager
def on_checkpoint_request(callback: Callable[[bool], None]) -> Iterator[None]:
    """Call `callback`, in a separate thread, on a SIGUSR1 or SIGUSR2 inside the block.

    Its argument is whether the job should end after the checkpoint, as SIGUSR2 requests. A signal
    that arrived outside any block is handled when the next block begins.
    """
    _requests.append(callback)
    try:
        _give_requests()
        yield
    finally:
        _requests.pop()


def handle_signals(program: str) -> None:
    """Install handlers for the signals that the program does not handle; may be called again.

    On SIGINT and SIGTERM, report the signal on rank 0, call the exit callback, and exit; on SIGUSR1
    and SIGUSR2, call the callback for checkpoint requests. A SIGINT that the parent ignores stays
    ignored: a shell's background job should not end by a Ctrl-C meant for another program.

    A thread woken by the wake-up file descriptor acts on signals, since the main thread may be
    inside MPI. mpirun forwards SIGUSR1 and SIGUSR2 to all processes of a rank, so all other threads
    block them: call this before any thread is started. Outside the main thread, it does nothing.
    """
    global _program
    if threading.current_thread() is not threading.main_thread():
        return
    if not _program:
        _program = program
        _start_thread()
        _keep_from_children()
    for number in (*_REASONS, *CHECKPOINT_SIGNALS):
        handler = signal.getsignal(number)
        is_meant = handler is signal.SIG_IGN and number != signal.SIGINT
        if is_meant or handler in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _handle)
    signal.pthread_sigmask(signal.SIG_BLOCK, filter(_is_ours, CHECKPOINT_SIGNALS))


def _start_thread() -> None:
    """Start the thread that acts on signals."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # e.g. an event loop's

    def wait_for_signal() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CHECKPOINT_SIGNALS)
        while True:
            byte = os.read(reader, 1)
            if previous >= 0:
                with suppress(OSError):
                    os.write(previous, byte)
            if _is_ours(byte[0]):
                _act_on(byte[0])

    threading.Thread(target=wait_for_signal, name="kaitian-signals", daemon=True).start()


def _is_ours(number: int) -> bool:
    """Return whether a signal is handled here; the program may have replaced the handler."""
    return signal.getsignal(number) is _handle


def _act_on(number: int) -> None:
    if number in _REASONS:
        _exit_by_signal(number)
    _unanswered.append(number == signal.SIGUSR2)
    _give_requests()


def _give_requests() -> None:
    """Pass requests to the innermost block, if there is one; called from both threads."""
    with suppress(IndexError):  # there is no block, or no request left
        while True:
            callback = _requests[-1]
            callback(_unanswered.popleft())


def _handle(number: int, frame: FrameType | None) -> None:
    if number in _REASONS and _exits and (act := _exits[-1].in_main_thread):
        act()


def _keep_from_children() -> None:
    """Restore the default handlers in forks: otherwise their signals would reach this process."""
    masks = threading.local()
    ours = os.getpid()

    def before() -> None:
        # Block signals until the child has its handlers.
        masks.outside = signal.pthread_sigmask(signal.SIG_BLOCK, _REASONS)

    def after_in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.outside)

    def after_in_child() -> None:
        nonlocal ours
        if ours:  # not in the child's own forks: it may have set other handlers
            ours = 0
            signal.set_wakeup_fd(-1)
            for number in filter(_is_ours, (*_REASONS, *CHECKPOINT_SIGNALS)):
                is_int = number == signal.SIGINT  # checkpoint signals are still blocked
                signal.signal(number, signal.default_int_handler if is_int else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.outside)

    os.register_at_fork(
        before=before, after_in_parent=after_in_parent, after_in_child=after_in_child
    )


def _exit_by_signal(number: int) -> None:
    try:
        block = _exits[-1]
    except IndexError:  # the main thread may leave the block at any moment
        block = _Exit(callback=lambda: None, in_main_thread=None, reports=None)
    reports = block.reports
    if reports is None:
        reports = read_launch(os.environ).world_rank == 0
    if reports:
        write_to_launcher_stderr(f"{_REASONS[number]}; ending the job")
    try:
        message = block.callback()
    except Exception as error:  # this process has to exit after any error
        message = f"nothing could be saved: {error}"
    if message:
        write_to_launcher_stderr(message)
    elif message == "":
        # Another rank may be saving, and the launcher kills it once this one has exited.
        time.sleep(_OTHERS_SAVING_SEC)
    if ulfm.is_enabled():
        # Open MPI notifies the others of a rank's end only if a signal killed it.
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(128 + number)


def output_line(text: str) -> bytes:
    """Return an encoded line of output, prefixed with the program's name."""
    return f"{_program}: {text}\n".encode()


def write_to_launcher_stderr(text: str) -> None:
    """Write a line directly to the launcher's stderr: mpirun drops its ranks' output on Ctrl-C."""
    try:
        descriptor = open_launcher_stderr()
    except OSError:
        print_to_stderr(output_line(text).decode())
        return
    with suppress(OSError):
        os.write(descriptor, output_line(text))
    os.close(descriptor)


def open_launcher_stderr() -> int:
    """Return a new file descriptor of the launcher's stderr, or of this process's own."""
    library = launched_by(os.environ)
    if library is not None and library.kills_soon:
        return os.open(f"/proc/{launcher_pid()}/fd/2", os.O_WRONLY | os.O_APPEND)
    sys.stderr.flush()
    return os.dup(2)
