"""Lets another process fork a rank, and stands for the rank until it ends. Imports little.

A command that starts mpirun itself (`-n`) also starts a process that loads torch once and forks the
ranks, see `cli/forking_process.py`: on the few cores of a host without accelerators, most of a
start is that each rank loads the same modules. mpirun starts the command as ever; its process
passes on what it was started with, and then its signals, and ends as the rank does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass

from kaitian_mpi.runtime import FORKS_AT
from kaitian_mpi.runtime.system import die_with_parent

FORK = "KAITIAN_FORK_RANKS"
"""The user's variable: if it is 0, each rank loads torch."""

STREAMS = (0, 1, 2)
"""A rank's stdin, stdout and stderr, which are passed beside a request."""

LONGEST_REQUEST = 1 << 18  # bytes; the system may permit less
LOADING_SEC = 120.0
"""How long a rank waits for the modules to be loaded before it loads them itself."""
PASSED_ON = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTSTP, signal.SIGCONT),
)
_PID_BYTES = 32
_CREDENTIALS = "3i"  # of Linux's `struct ucred`: pid, uid, gid


@dataclass(frozen=True, kw_only=True)
class RankRequest:
    """What a rank's process was started with."""

    arguments: list[str]
    """`sys.argv`"""
    original_arguments: list[str]
    """`sys.orig_argv`"""
    module_path: list[str]
    """`sys.path`"""
    folder: str
    """The current one."""
    variables: dict[str, str]
    cores: list[int]
    ignored: list[int]
    """Signals that are ignored."""
    blocked: list[int]
    """Signals that are blocked."""
    umask: int
    process: int
    """Its pid."""
    launcher: int
    """The pid of the process that has started it."""

    def encode(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, text: bytes) -> RankRequest:
        """Return what `encode` has written."""
        return cls(**json.loads(text))


def address_of(name: str) -> str:
    """Return a socket's address without a file, which Linux drops with the socket."""
    return f"\0{name}"


def is_of_this_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a connection has this process's user."""
    size = struct.calcsize(_CREDENTIALS)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack(_CREDENTIALS, credentials)[1] == os.geteuid())


def stand_for_forked_rank() -> None:
    """Have this rank forked, stand for it, and end as it does.

    Returns if nothing forks ranks, or if it cannot: then this process is the rank.
    """
    name = os.environ.pop(FORKS_AT, "")
    if not name or not hasattr(socket, "SO_PEERCRED"):
        return
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address_of(name))
        if is_of_this_user(connection):
            request = _request(blocked).encode()
            socket.send_fds(connection, [request], STREAMS)
            connection.settimeout(LOADING_SEC)
            if rank := connection.recv(_PID_BYTES):
                connection.settimeout(None)
                _stand_for(int(rank), connection)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _request(blocked: Iterable[int]) -> RankRequest:
    umask = os.umask(0)
    os.umask(umask)
    return RankRequest(
        arguments=sys.argv,
        original_arguments=sys.orig_argv,
        module_path=sys.path,
        folder=os.getcwd(),
        variables=dict(os.environ),
        cores=sorted(os.sched_getaffinity(0)),
        ignored=[number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN],
        blocked=sorted(blocked),
        umask=umask,
        process=os.getpid(),
        launcher=os.getppid(),
    )


def _stand_for(rank: int, connection: socket.socket) -> None:
    """Pass signals to a rank, and end as it does."""
    # The forking process then ends the rank.
    die_with_parent(signal.SIGKILL)
    with suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(f"for-{rank}")  # which `start_watch_process.py` reads

    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(rank, number)  # as mpirun does, to all processes of the rank

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    try:
        code = int(connection.recv(_PID_BYTES) or -signal.SIGKILL)
    except OSError:
        code = -signal.SIGKILL
    if code < 0:
        _end_by_signal(-code)
    os._exit(code)


def _end_by_signal(number: int) -> None:
    """End by a signal as the rank did, for the launcher to see; the rank has dumped its core."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    signal.pause()
