"""What a rank does at a signal: it ends, with its state saved, or saves a checkpoint and goes on.

Open MPI's mpirun, told to end by SIGTERM or Ctrl-C, sends its ranks SIGCONT, 0.25 s later SIGTERM,
and 0.25 s later, or as soon as any rank has ended, SIGKILL. There is no option for more time, so
what takes longer is done by a process that the SIGKILL does not reach, in a session of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.abort import say
from kaitian_mpi.runtime.launcher import read_launch

REQUESTS = (signal.SIGUSR1, signal.SIGUSR2)
"""Ask for a checkpoint: a batch system's warning before it ends the job."""

_SAVING_SEC = 2.0
_MEANINGS: dict[int, str] = {
    signal.SIGINT: "interrupted by Ctrl-C",
    # mpirun sends this for every reason it has, and does not tell which.
    signal.SIGTERM: "stopped by SIGTERM: Ctrl-C, a time limit, or another rank's fault",
}

_program = ""
_last_words: Callable[[], str | None] | None = None
_in_main_thread: Callable[[], None] | None = None
_on_request: Callable[[], None] | None = None


@contextmanager
def last_words(
    speak: Callable[[], str | None], in_main_thread: Callable[[], None] | None = None
) -> Iterator[None]:
    """Call `speak` before a signal ends this process inside the block; show what it returns.

    Args:
        speak: runs in a thread of its own, and has 0.25 s: then mpirun sends a SIGKILL. It returns
            a line, None where there is none, or "" where another rank may have one.
        in_main_thread: runs in the main thread at the same time, as soon as that executes Python.
    """
    global _last_words, _in_main_thread
    _last_words, _in_main_thread = speak, in_main_thread
    try:
        yield
    finally:
        _last_words = _in_main_thread = None


@contextmanager
def requests(answer: Callable[[], None]) -> Iterator[None]:
    """Call `answer`, in a thread of its own, at a SIGUSR1 or SIGUSR2 inside the block."""
    global _on_request
    _on_request = answer
    try:
        yield
    finally:
        _on_request = None


def handle_signals(program: str) -> None:
    """On SIGINT and SIGTERM say so from rank 0, have the last words, and end this process.

    The main thread may be inside MPI, where Python's handlers do not run, so a small thread learns
    of the signal through the wake-up descriptor and ends the process. It gets SIGUSR1 and SIGUSR2
    as well: mpirun passes them on to all processes of a rank, so the others' threads block them,
    and with them every process that this one starts. Call it before any thread is started.
    """
    global _program
    _program = program
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (*_MEANINGS, *REQUESTS):
        signal.signal(number, _handle)
    signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    _keep_from_children()

    def wait_for_signal() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
        while True:
            number = os.read(reader, 1)[0]
            if number in REQUESTS and _on_request is not None:
                _on_request()
            elif number in _MEANINGS:
                _end_by_signal(number)

    threading.Thread(target=wait_for_signal, name="kaitian-signals", daemon=True).start()


def _handle(number: int, frame: FrameType | None) -> None:
    if number in _MEANINGS and _in_main_thread is not None:
        _in_main_thread()


def _keep_from_children() -> None:
    """Give forked processes the usual handlers: a signal to one is none to this process.

    They would write to this process's wake-up descriptor.
    """
    masks = threading.local()
    ours = os.getpid()

    def before() -> None:
        # What comes for the child before it has its handlers shall wait.
        masks.outside = signal.pthread_sigmask(signal.SIG_BLOCK, _MEANINGS)

    def after_in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.outside)

    def after_in_child() -> None:
        nonlocal ours
        if ours:  # not again in a child of the child, which may have handlers of its own
            ours = 0
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for number in REQUESTS:
                signal.signal(number, signal.SIG_DFL)  # but still blocked, by the mask
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.outside)

    os.register_at_fork(
        before=before, after_in_parent=after_in_parent, after_in_child=after_in_child
    )


def _end_by_signal(number: int) -> None:
    if read_launch(os.environ).world_rank == 0:
        say_past_launcher(f"{_MEANINGS[number]}; the job ends")
    try:
        words = _last_words() if _last_words is not None else None
    except Exception as error:  # whatever it is, this process has to end
        words = f"nothing could be saved: {error}"
    if words:
        say_past_launcher(words)
    elif words == "":
        # Another rank may be saving, and the launcher kills it once this one has ended.
        time.sleep(_SAVING_SEC)
    if ulfm.is_on():
        # Of one rank's end alone the others hear only if a signal is the cause.
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(128 + number)


def line_of(text: str) -> bytes:
    """Return a line that names the program, ready to be written."""
    return f"{_program}: {text}\n".encode()


def say_past_launcher(text: str) -> None:
    """Write a line to the launcher's own stderr: mpirun drops the ranks' output on Ctrl-C."""
    try:
        descriptor = open_launcher_stderr()
    except OSError:
        say(line_of(text).decode())
        return
    with suppress(OSError):
        os.write(descriptor, line_of(text))
    os.close(descriptor)


def open_launcher_stderr() -> int:
    """Return a new descriptor of the launcher's own stderr; of this process's without a launcher.

    Raises:
        OSError: the launcher is gone, or another user's.
    """
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        return os.open(f"/proc/{os.getppid()}/fd/2", os.O_WRONLY | os.O_APPEND)
    sys.stderr.flush()
    return os.dup(2)
