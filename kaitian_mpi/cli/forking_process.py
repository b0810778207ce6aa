"""Loads torch once and forks the ranks of `kaitian-train -n` and `kaitian-run -n`.

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
from functools import partial
from importlib import import_module
from pathlib import Path

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's folder

from kaitian_mpi.devices.drivers import may_have_accelerators
from kaitian_mpi.runtime.forked_rank import (
    LONGEST_REQUEST,
    PASSED_ON,
    STREAMS,
    RankRequest,
    is_of_this_user,
)
from kaitian_mpi.runtime.launcher import Launch, prepare_environment
from kaitian_mpi.runtime.system import die_with_parent, set_launcher, usable_cores

_LOADED = {
    "kaitian_mpi.cli.train": (
        "kaitian_mpi.distributed.startup",
        "kaitian_mpi.recipes.image_classification",
        "kaitian_mpi.train.training",
    ),
    "kaitian_mpi.cli.run": ("kaitian_mpi.distributed.startup",),
}
"""What ranks load later, by the module that they run."""
_MPIRUN = 0  # a pipe that is closed when mpirun has ended


def main(listener: str, program: str, ranks: str) -> None:
    """Fork ranks of a program for connections to the socket of this descriptor."""
    if may_have_accelerators():
        return
    module = f"kaitian_mpi.cli.{program.removeprefix('kaitian-')}"
    load(module, int(ranks))
    gc.freeze()  # a collection would copy the memory that the ranks share
    # mpirun ends the ranks; this process ends after them.
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(listener)) as server, ForkedRanks(server) as forked_ranks:
        request = forked_ranks.serve()
    if request is not None:
        become(request, program)
        import_module(module).main()


def load(module: str, ranks: int) -> None:
    """Load what the ranks would load, in the environment in which they would."""
    prepare_environment(os.environ, Launch(0, ranks, 0, ranks), len(usable_cores()))
    import_module(module)
    from kaitian_mpi.devices.plugin import (
        import_for_optimizers,
        import_torch,
        without_collection,
    )

    import_torch()
    with without_collection():
        for name in _LOADED[module]:
            import_module(name)
    import_for_optimizers()


class ForkedRanks:
    """The ranks that this process has forked.

    When a rank has ended, the process that stands for it is told how; when that process has ended,
    its rank is killed.
    """

    def __init__(self, server: socket.socket) -> None:
        """Fork none yet; `server` is where ranks ask for it."""
        self._server = server
        self._pid = os.getpid()
        self._cores = sorted(usable_cores())
        self._pids: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ, self._accept)
        self._selector.register(_MPIRUN, selectors.EVENT_READ, self._end)
        self._runs = True

    def __enter__(self) -> ForkedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for connection in self._pids:
            connection.close()

    def serve(self) -> RankRequest | None:
        """Fork ranks until mpirun and they have ended; in a forked rank, return its request."""
        while self._runs or self._pids:
            for key, _ in self._selector.select():
                request = key.data()
                if request is not None:
                    return request
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
            connection.close()
            for number, stream in zip(STREAMS, streams, strict=True):
                os.dup2(stream, number)
            _close(streams)
            return request
        _close(streams)
        process = os.pidfd_open(pid)
        self._pids[connection] = pid
        report = partial(self._report, connection, process)
        kill = partial(self._kill, connection)
        self._selector.register(process, selectors.EVENT_READ, report)
        self._selector.register(connection, selectors.EVENT_READ, kill)
        with suppress(OSError):  # what asked for it has ended
            connection.send(b"%d" % pid)
        return None

    def _kill(self, connection: socket.socket) -> None:
        """Kill a rank, as what has stood for it is gone; that it has ended is noticed as ever."""
        if connection in self._pids:
            os.kill(self._pids[connection], signal.SIGKILL)

    def _report(self, connection: socket.socket, process: int) -> None:
        """Report how a rank has ended."""
        _, status = os.waitpid(self._pids.pop(connection), 0)
        with suppress(OSError):
            connection.send(b"%d" % os.waitstatus_to_exitcode(status))
        for ended in (process, connection):
            self._selector.unregister(ended)
        _close([process, connection.detach()])


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def become(request: RankRequest, program: str) -> None:
    """Make this process what the one that has asked for it would have become."""
    os.setpgid(0, 0)
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
    sys.path[:] = request.module_path
    script = sys.modules["__main__"] = types.ModuleType("__main__")
    script.__file__ = request.arguments[0]
    with suppress(OSError):
        Path("/proc/self/comm").write_text(program)
    sys.modules["numpy"].random.seed()  # Python's own generator is seeded at each fork


if __name__ == "__main__":
    main(*sys.argv[1:])
