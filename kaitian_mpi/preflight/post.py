"""Messages of `kaitian-doctor` between two ranks; each wait has a limit, and none is collective."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.polling import keep_alive, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

_MAX_NAP_SEC = 5e-3


class NoAnswerError(Exception):
    """A rank has not answered in time, or has died."""


class Post:
    """Sends and receives values as JSON without blocking, and bytes while both ranks wait.

    Args:
        comm: all ranks; nothing else may communicate on it.
        limit_sec: how long bytes may take.
    """

    def __init__(self, comm: MPI.Comm, limit_sec: float) -> None:
        self._comm, self._limit_sec = comm, limit_sec
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._lost = False

    def send(self, target: int, value: Any) -> None:
        """Send a value without waiting."""
        from mpi4py import MPI

        content = json.dumps(value).encode()
        request = self._comm.Isend([content, MPI.BYTE], target, tags.DOCTOR_VALUES)
        self._sent.append((request, content))

    def receive(self, source: int, limit_sec: float) -> Any:
        """Return the next value of this rank.

        Raises:
            NoAnswerError: none arrived within the limit.
        """
        from mpi4py import MPI

        status = MPI.Status()
        self._wait(lambda: bool(self._comm.Iprobe(source, tags.DOCTOR_VALUES, status)), limit_sec)
        content = bytearray(status.Get_count(MPI.BYTE))
        request = self._comm.Irecv([content, MPI.BYTE], source, tags.DOCTOR_VALUES)
        self._wait(request.Test, limit_sec, request, content)
        return json.loads(content)

    def push(self, target: int, content: bytes) -> None:
        """Send bytes, and wait until they are sent; see `receive` for the error."""
        from mpi4py import MPI

        request = self._comm.Isend([content, MPI.BYTE], target, tags.DOCTOR_PROBE)
        self._wait(request.Test, self._limit_sec, request, content)

    def pull(self, source: int, size: int) -> bytearray:
        """Receive this many bytes; see `receive` for the error."""
        from mpi4py import MPI

        content = bytearray(size)
        request = self._comm.Irecv([content, MPI.BYTE], source, tags.DOCTOR_PROBE)
        self._wait(request.Test, self._limit_sec, request, content, max_nap_sec=1e-3)
        return content

    def settle(self, limit_sec: float) -> bool:
        """Wait until everything sent has arrived, so that MPI can be finalized; or return False."""

        def is_clean() -> bool:
            return not self._lost and all(request.Test() for request, _ in self._sent)

        return wait_until(is_clean, limit_sec, _MAX_NAP_SEC)

    def _wait(
        self,
        condition: Callable[[], bool],
        limit_sec: float,
        *kept: object,
        max_nap_sec: float = _MAX_NAP_SEC,
    ) -> None:
        from mpi4py import MPI

        try:
            if wait_until(condition, limit_sec, max_nap_sec):
                return
        except MPI.Exception as error:
            self._lost = True
            raise NoAnswerError(f"has died ({error})") from error
        self._lost = bool(kept)
        keep_alive(*kept)
        raise NoAnswerError(f"has sent nothing for {limit_sec:.0f} s")
