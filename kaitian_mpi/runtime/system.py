"""The process's threads and cores, and functions that only Linux has."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1

_default_threads: int | None = None
_launcher: int | None = None  # of a rank that the launcher's own child has had forked

THREADS_VARIABLE = "OMP_NUM_THREADS"
CHOSEN_THREADS_VARIABLE = "KAITIAN_OMP_NUM_THREADS"
"""Holds what this package has set `OMP_NUM_THREADS` to, which is no choice of the user's."""


class CommunicationThread(threading.Thread):
    """A thread that executes collectives or messages, and no code of the script but callbacks."""

    def __init__(
        self,
        target: Callable[[], None],
        name: str | None = None,
        select_device: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare a thread that first selects its device and then does its work, `target`.

        A new thread's current device is the first one, where leaving a stream of another would make
        a context, of about 0.5 GB.
        """
        super().__init__(name=name, daemon=True)
        self._work = target
        self._select_device = select_device

    def run(self) -> None:
        """Select the device, then work; `start` calls it in the new thread."""
        self._select_device()
        self._work()


ThreadMaker = Callable[[Callable[[], None], str], CommunicationThread]
"""Returns a thread of this work and name, which is not started yet."""


def usable_cores() -> frozenset[int]:
    """Return the cores this process may run on (its CPU affinity); all cores without one."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def set_launcher(pid: int) -> None:
    """Have `launcher_pid` return a process that is not this one's parent."""
    global _launcher
    _launcher = pid


def launcher_pid() -> int:
    """Return the pid of the process that has started this rank, as far as the job is concerned."""
    return os.getppid() if _launcher is None else _launcher


def launcher_cores() -> frozenset[int]:
    """Return the cores that this rank's launcher may run on: mpirun binds ranks, not itself."""
    try:
        return frozenset(os.sched_getaffinity(launcher_pid()))
    except (AttributeError, OSError):
        return usable_cores()


def ancestor_named(names: Sequence[str]) -> int | None:
    """Return this rank's nearest ancestor that has one of these names (Linux), if any."""
    pid = launcher_pid()
    with suppress(OSError):
        while pid > 1:
            name, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            if name.partition("(")[2] in names:
                return pid
            pid = int(fields.split()[1])
    return None


def die_with_parent(number: signal.Signals, parent: int = 0) -> None:
    """Make the kernel send this process a signal when its parent exits (Linux); 0: this parent."""
    parent = parent or os.getppid()
    prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(128 + number)


def prctl(option: int, value: int) -> None:
    """Call Linux's `prctl`; elsewhere do nothing."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(option, value, 0, 0, 0)


def anonymous_file(name: str) -> int:
    """Return the descriptor of a new file without a path: in memory on Linux, else on disk."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def record_default_threads() -> None:
    """Record torch's current number of threads as the default, not chosen by the script."""
    import torch

    global _default_threads
    _default_threads = torch.get_num_threads()


def set_default_threads(threads: int) -> int:
    """Set torch's number of threads, unless the user or script has; return what it computes with.

    The user does by OMP_NUM_THREADS, the script by `torch.set_num_threads`.
    """
    import torch

    is_given = os.environ.get(THREADS_VARIABLE) != os.environ.get(CHOSEN_THREADS_VARIABLE)
    if not is_given and _default_threads in (None, torch.get_num_threads()):
        torch.set_num_threads(threads)
        record_default_threads()
    return torch.get_num_threads()
