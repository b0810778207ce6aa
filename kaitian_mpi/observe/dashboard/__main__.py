"""The process that serves a run's live page, started by the rank that writes the run's files.

It reads nothing of the job but the run folder, at the lowest priority, and ends with the rank that
started it::

    python -P -m kaitian_mpi.observe.dashboard RUN_DIR SOCKET RANK_PID < pipe

SOCKET is the number of an inherited listening socket. The pipe's first line is the token; the pipe
is closed when the rank ends.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

_POLL_SEC = 0.5
_LOWEST = 19
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(folder: str, number: str, rank: str) -> None:
    """Serve until the rank ends."""
    # A rank that gets one of these signals may still write its last results: the page stays.
    for ignored in _IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    _lower_priority()
    token = _read_line(0)
    threading.Thread(target=_end_with, args=(int(rank),), daemon=True).start()
    # Imported late, so that a job that ends at once need not wait for this.
    from kaitian_mpi.observe.dashboard.budget import use_cores_of_launcher
    from kaitian_mpi.observe.dashboard.server import serve_run

    use_cores_of_launcher(int(rank))

    serve_run(Path(folder), socket.socket(fileno=int(number)), token)


def _lower_priority() -> None:
    """Leave the cores to the ranks.

    Linux may group processes by session and share the cores among these groups; a priority then
    counts within a group only. So the group of this process, which leads a session, gets one too.
    """
    with suppress(OSError):
        os.nice(_LOWEST)
    if os.getsid(0) == os.getpid():
        with suppress(OSError), open("/proc/self/autogroup", "w") as file:
            file.write(str(_LOWEST))
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _read_line(descriptor: int) -> str:
    """Read a line byte by byte, so that nothing after it is lost in a buffer."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(descriptor, 1)):
            sys.exit(0)  # the rank has ended
        line += byte
    return line.decode().strip()


def _end_with(rank: int) -> None:
    """End this process once the rank has ended."""
    try:
        closed = select.poll()
        closed.register(0, 0)
        # A forked worker of the rank may hold the pipe's other end open.
        while os.getppid() == rank and not closed.poll(_POLL_SEC * 1000):
            pass
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
