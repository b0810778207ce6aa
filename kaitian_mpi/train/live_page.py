"""The live page of a run (`--dashboard`): starts and ends its process, which is `dashboard/`."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import kaitian_mpi
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.loopback import listen_on_loopback, make_token, show_address
from kaitian_mpi.runtime.launcher import SUPERVISED

_log = logging.getLogger(__name__)

_FLAG = "--dashboard"
_CLOSE_SEC = 0.5
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class LivePage(Protocol):
    """The page of a run on the rank that writes its files; `NoPage` where none is wanted."""

    def reserve(self, world: World) -> None:
        """Take the port, before anything is trained or written. Collective."""
        ...

    def serve(self, folder: Path) -> None:
        """Serve a run folder from this rank. Not collective; never raises."""
        ...

    def follow(self, folder: Path, writer: RankInfo, lost: Collection[int]) -> None:
        """Serve from the rank that now writes the files, if the serving rank no longer can.

        That is if it is lost, or on another host, which might not see the files. Not collective.

        Args:
            folder: the run folder.
            writer: the rank that writes the files now.
            lost: all world ranks that are lost.
        """
        ...

    def close(self) -> None:
        """Stop serving. Not collective."""
        ...


class NoPage:
    """Serves nothing."""

    def reserve(self, world: World) -> None:
        """Do nothing."""

    def serve(self, folder: Path) -> None:
        """Do nothing."""

    def follow(self, folder: Path, writer: RankInfo, lost: Collection[int]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class ServedPage:
    """A process of the lowest priority that reads the run folder and answers browsers.

    It ends when this rank does, however the rank ends.
    """

    def __init__(self, port: int) -> None:
        """Prepare; the port is taken by `reserve`.

        Args:
            port: on 127.0.0.1; 0 for any free one.
        """
        self._port = port
        self._token = ""
        self._own: RankInfo | None = None
        self._server: RankInfo | None = None
        """The rank that serves."""
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def reserve(self, world: World) -> None:
        """Take the port on rank 0. Collective.

        Raises:
            AgreedError: the port cannot be taken, or matplotlib is not installed.
        """
        self._own, self._server = world.info, world.infos[0]
        with agree_on_errors(world.comm):
            if world.rank == 0 and self._listener is None:
                self._listener = self._listen()
        if world.rank == 0:
            # A job that kaitian-supervise restarts keeps its address.
            self._token = self._token or make_token(os.environ.get(SUPERVISED, ""))
            assert self._listener is not None
            self._port = self._listener.getsockname()[1]
        # Known to all: the rank that writes the files when rank 0 is lost keeps the address.
        self._port, self._token = gather_values(world.comm, (self._port, self._token))[0]

    def serve(self, folder: Path) -> None:
        """Serve a run folder from this rank. Not collective; never raises."""
        if self._process is not None:
            return
        try:
            listener = self._listener or _listen_anywhere(self._port)
        except UserError as error:
            _log.warning("no live page: %s", error)
            return
        self._listener = None
        try:
            self._process = _start_process(folder, listener, self._token)
        except OSError as error:
            _log.warning("no live page: its process could not be started: %s", error.strerror)
            return
        finally:
            port = listener.getsockname()[1]
            listener.close()
        show_address(port, self._token)

    def follow(self, folder: Path, writer: RankInfo, lost: Collection[int]) -> None:
        """Serve from the rank that now writes the files, if the serving rank no longer can."""
        assert self._server is not None
        assert self._own is not None
        if self._server.world_rank not in lost and self._server.node == writer.node:
            return
        self._server = writer
        self.close()
        if self._own.world_rank == writer.world_rank:
            self.serve(folder)

    def close(self) -> None:
        """End the process, waiting for it for at most half a second."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_CLOSE_SEC)
        except subprocess.TimeoutExpired:  # it is stopped
            process.kill()
            process.wait()

    def _listen(self) -> socket.socket:
        if find_spec("matplotlib") is None:
            raise UserError(
                f"{_FLAG}: matplotlib is not installed, and is needed to draw the figures; "
                'pip install "kaitian-mpi[report]"'
            )
        # A job that was restarted must not end because its port was taken meanwhile.
        return (_listen_anywhere if SUPERVISED in os.environ else _listen_on)(self._port)


def make_page(config: TrainingConfig) -> LivePage:
    """Return the live page that a config asks for."""
    return NoPage() if config.dashboard < 0 else ServedPage(config.dashboard)


def _listen_on(port: int) -> socket.socket:
    return listen_on_loopback(port, _FLAG)


def _listen_anywhere(port: int) -> socket.socket:
    """Listen on a port, or on any free one if it is taken."""
    try:
        return _listen_on(port)
    except UserError:
        return _listen_on(0)


def _start_process(folder: Path, listener: socket.socket, token: str) -> subprocess.Popen[bytes]:
    """Start the process; it reads the token from a pipe, as all users can see command lines."""
    number = listener.fileno()
    # Appended, so that it is found where the package is not installed, and hides nothing.
    package = str(Path(kaitian_mpi.__file__).parents[1])
    paths = filter(None, (os.environ.get("PYTHONPATH"), package))
    process = subprocess.Popen(  # noqa: S603  # our own module, no shell
        [
            *(sys.executable, "-P", "-m", "kaitian_mpi.observe.dashboard"),
            *(str(folder.absolute()), str(number), str(os.getpid())),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=(number,),
        start_new_session=True,  # see _lower_priority in observe/dashboard/__main__.py
        env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert process.stdin is not None
    with suppress(OSError):  # it has ended already, and has said why
        process.stdin.write(f"{token}\n".encode())
        process.stdin.flush()
    return process
