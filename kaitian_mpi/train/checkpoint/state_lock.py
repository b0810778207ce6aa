"""Saves the state when a signal ends the job, in a forked process that outlives the rank.

mpirun kills its ranks 0.25 s after it has sent them the signal. So the rank only forks: the child
has a complete copy of the state, at the cost of copying the page tables, and writes it in its own
session, which mpirun's SIGKILL does not reach.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kaitian_mpi.runtime.signals import open_launcher_stderr, output_line

_STDERR = 2
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Batch scripts wait for processes of this name (examples/cluster).
_PROCESS_NAME = "kaitian-save"


class StateLock:
    """Held while the state changes; taken by any other reader of it.

    Has a forked child save the state, once, as soon as a signal arrives. The state is consistent
    except while the main thread changes it and holds the lock. The change may take longer than the
    time until the SIGKILL, so then the main thread itself forks, in Python's signal handler: the
    child completes the change in the rank's place, and saves.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = self._depth = self._child = 0
        self._is_ending = self._saves_on_release = False
        self._after_change: Callable[[], None] = lambda: None
        self._can_complete: Callable[[], bool] = lambda: True

    def set_exit_save(
        self,
        save: Callable[[], str],
        prepare: Callable[[], None] | None = None,
        after_fork: Callable[[], None] = lambda: None,
        after_change: Callable[[], None] = lambda: None,
        can_complete: Callable[[], bool] = lambda: True,
    ) -> None:
        """Set how the state is saved from now on.

        Args:
            save: called in the child; returns a line that reports what was saved.
            prepare: called in the rank before the fork, with a consistent state, if a child cannot
                access the state because it is on a device: copies it to the host.
            after_fork: called first in the child, which has none of this process's other threads.
            after_change: called after each change of the state, with the lock held.
            can_complete: whether a child can complete a change, for which no other rank is needed.
        """
        self._save = save
        self._prepare = prepare
        self._after_fork = after_fork
        self._after_change = after_change
        self._can_complete = can_complete

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            # In this order: a signal handler that runs in between finds one or the other.
            self._owner = threading.get_ident()
            if self._is_ending:
                if self._prepare is not None and not self._child:
                    self._prepare()
                if self._fork():
                    self._finish(None)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._depth == 1:
            if error is None:
                self._after_change()
            if self._saves_on_release:
                self._finish(error)
            self._owner = 0
        self._depth -= 1
        self._lock.release()

    def save(self) -> str | None:
        """Save the state and wait until it is saved; for the thread that handles the signal.

        The lock is not released: this process must exit afterwards.
        """
        self._is_ending = True
        self.__enter__()
        if not self._child:  # no process could be forked
            return self._save()
        os.waitpid(self._child, 0)
        return None

    def interrupt(self) -> None:
        """Fork now if the main thread is changing the state. For its signal handler."""
        self._is_ending = True
        if self._owner == threading.get_ident() and self._prepare is None:
            is_child = self._fork()
            if is_child and not self._can_complete():  # it would wait for other ranks forever
                self._finish(None)
            self._saves_on_release = is_child  # once it has completed the change

    def _fork(self) -> bool:
        """Fork, once; return whether this is the child."""
        if self._child:
            return False
        with suppress(OSError):  # no memory, or too many processes
            try:
                stderr = open_launcher_stderr()
            except OSError:
                stderr = os.dup(_STDERR)
            # The child inherits this name, for which a batch script looks when mpirun has ended.
            with suppress(OSError):
                Path("/proc/thread-self/comm").write_text(_PROCESS_NAME)
            # A batch system signals every process, and mpirun its ranks again: not the new child.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
            self._child = os.fork()
            if self._child == 0:
                self._is_ending = False
                os.dup2(stderr, _STDERR)
                _detach_from_job()
                self._after_fork()
                return True
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(stderr)
        return False

    def _finish(self, error: BaseException | None) -> None:
        """Save, print what was saved, and exit the child process."""
        try:
            message = self._save() if error is None else f"nothing could be saved: {error}"
        except BaseException as fault:
            message = f"nothing could be saved: {type(fault).__name__}: {fault}"
        with suppress(OSError):
            os.write(_STDERR, output_line(message))
        os._exit(0)


def _detach_from_job() -> None:
    """Give this forked child a session of its own, and none of the rank's descriptors.

    mpirun sends its signals to the rank's process group; and the other ranks and the watchdog
    notice the rank's end by its connections being closed.
    """
    os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > _STDERR:
            with suppress(OSError):
                os.close(descriptor)
