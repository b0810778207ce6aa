"""Loads torch once and forks the ranks of `kaitian-train -n`, and of the other commands' `-n`.

Started beside mpirun; ends when mpirun and its ranks have ended. Ranks that it does not fork, as it
may not or has failed, load torch themselves. It forks none where an accelerator may be: a driver
does not survive a fork, and such a host has the cores that starts need.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
import types
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's folder

from kaitian_mpi.devices.drivers import may_have_accelerators
from kaitian_mpi.devices.plugin import import_for_optimizers, load_torch
from kaitian_mpi.runtime.forked_rank import (
    LONGEST_REQUEST,
    PASSED_ON,
    STREAMS,
    RankRequest,
    is_of_this_user,
)
from kaitian_mpi.runtime.launcher import Launch
from kaitian_mpi.runtime.start_watch_process import read_stat
from kaitian_mpi.runtime.system import die_with_parent, set_launcher, usable_cores

_TO_TRAIN = (
    "kaitian_mpi.distributed.startup",
    "kaitian_mpi.recipes.image_classification",
    "kaitian_mpi.train.training",
)
_LOADED = {
    "kaitian_mpi.cli.train": _TO_TRAIN,
    "kaitian_mpi.cli.plan": _TO_TRAIN,
    "kaitian_mpi.cli.run": ("kaitian_mpi.distributed.startup",),
}
"""What ranks load later, by the module that they run."""
_STOPS_NOTICED_SEC = 0.5
_MPIRUN = 0  # a pipe that is closed when mpirun has ended


def main(listener: str, program: str, ranks: str) -> None:
    """Fork ranks of a program for connections to the socket of this descriptor."""
    if may_have_accelerators():
        return
    module = f"kaitian_mpi.cli.{program.removeprefix('kaitian-')}"
    size = int(ranks)
    load_torch(Launch(0, size, 0, size), [module, *_LOADED[module]])
    import_for_optimizers()
    gc.freeze()  # a collection would copy the memory that the ranks share
    # mpirun ends the ranks; this process ends after them.
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(listener)) as server, ForkedRanks(server) as forked_ranks:
        request = forked_ranks.serve()
    if request is not None:
        become(request, program)
        import_module(module).main()


@dataclass
class ForkedRank:
    """A rank, and the process that stands for it."""

    pid: int
    descriptor: int
    """Of the rank's process; it can be read when that has ended."""
    connection: socket.socket
    """To the process that stands for it."""
    stands_for: int
    """The pid of that process."""
    is_stopped: bool = False
    has_ended: bool = False

    def kill(self) -> None:
        """Kill it, as what has stood for it is gone."""
        if not self.has_ended:
            os.kill(self.pid, signal.SIGKILL)

    def report_end(self) -> None:
        """Tell the process that stands for it how it has ended."""
        self.has_ended = True
        _, status = os.waitpid(self.pid, 0)
        with suppress(OSError):
            self.connection.send(b"%d" % os.waitstatus_to_exitcode(status))

    def follow_stop(self) -> None:
        """Stop it, or let it go on, as the process that stands for it, which cannot do that.

        For a Ctrl-Z, the launcher sends SIGSTOP.
        """
        with suppress(OSError):  # one of them is about to end
            is_stopped = read_stat(self.stands_for)[0] == "T"
            if is_stopped != self.is_stopped:
                self.is_stopped = is_stopped
                os.killpg(self.pid, signal.SIGSTOP if is_stopped else signal.SIGCONT)


class ForkedRanks:
    """The ranks that this process has forked."""

    def __init__(self, server: socket.socket) -> None:
        """Fork none yet; `server` is where ranks ask for it."""
        self._server = server
        self._pid = os.getpid()
        self._cores = sorted(usable_cores())
        self._ranks: list[ForkedRank] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ, self._accept)
        self._selector.register(_MPIRUN, selectors.EVENT_READ, self._end)
        self._runs = True

    def __enter__(self) -> ForkedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for rank in self._ranks:
            _close([rank.descriptor, rank.connection.detach()])

    def serve(self) -> RankRequest | None:
        """Fork ranks until mpirun and they have ended; in a forked rank, return its request."""
        while self._runs or self._ranks:
            for key, _ in self._selector.select(_STOPS_NOTICED_SEC):
                request = key.data()
                if request is not None:
                    return request
            for rank in self._ranks:
                rank.follow_stop()
            for rank in [rank for rank in self._ranks if rank.has_ended]:
                self._forget(rank)
        return None

    def _end(self) -> None:
        self._runs = False
        self._selector.unregister(_MPIRUN)

    def _accept(self) -> RankRequest | None:
        connection, _ = self._server.accept()
        streams: list[int] = []
        with suppress(OSError, ValueError, TypeError):
            if is_of_this_user(connection):
                text, streams, _, _ = socket.recv_fds(connection, LONGEST_REQUEST, len(STREAMS))
                request = RankRequest.decode(text)
                # torch has been loaded for these cores.
                if request.cores == self._cores and len(streams) == len(STREAMS):
                    return self._fork(request, streams, connection)
        _close([*streams, connection.detach()])  # it then loads torch itself
        return None

    def _fork(
        self, request: RankRequest, streams: list[int], connection: socket.socket
    ) -> RankRequest | None:
        pid = os.fork()
        if pid == 0:
            die_with_parent(signal.SIGKILL, self._pid)
            os.setpgid(0, 0)
            connection.close()
            for number, stream in zip(STREAMS, streams, strict=True):
                os.dup2(stream, number)
            _close(streams)
            return request
        _close(streams)
        rank = ForkedRank(pid, os.pidfd_open(pid), connection, request.process)
        self._ranks.append(rank)
        self._selector.register(rank.descriptor, selectors.EVENT_READ, rank.report_end)
        self._selector.register(connection, selectors.EVENT_READ, rank.kill)
        with suppress(OSError):  # what asked for it has ended
            connection.send(b"%d" % pid)
        return None

    def _forget(self, rank: ForkedRank) -> None:
        """Forget a rank that has ended."""
        self._ranks.remove(rank)
        for ended in (rank.descriptor, rank.connection):
            self._selector.unregister(ended)
        _close([rank.descriptor, rank.connection.detach()])


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def become(request: RankRequest, program: str) -> None:
    """Make this process what the one that has asked for it would have become."""
    os.umask(request.umask)
    os.chdir(request.folder)
    for number in PASSED_ON:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request.ignored else usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    set_launcher(request.launcher)
    os.environ.clear()
    os.environ.update(request.variables)
    sys.argv[:] = request.arguments
    sys.orig_argv[:] = request.original_arguments
    sys.path[:] = request.module_path
    script = sys.modules["__main__"] = types.ModuleType("__main__")
    script.__file__ = request.arguments[0]
    with suppress(OSError):
        Path("/proc/self/comm").write_text(program)
    # Python's own generator is seeded at each fork.
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()


if __name__ == "__main__":
    main(*sys.argv[1:])
