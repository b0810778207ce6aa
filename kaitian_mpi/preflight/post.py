"""Messages between ranks with time limits: nothing here waits for ever, and nothing is collective.

A collective would hang with the one rank that hangs; so every rank speaks with rank 0 alone.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kaitian_mpi.runtime import tags
from kaitian_mpi.runtime.polling import keep_alive, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

_MAX_NAP_SEC = 5e-3


class NoAnswerError(Exception):
    """A rank has not answered in time, or MPI says that it is gone."""


class Post:
    """Sends and receives small values as JSON.

    Attributes:
        is_clean: whether everything sent and awaited has ended, so that MPI can be
            finalized.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._lost = False

    @property
    def is_clean(self) -> bool:
        """Whether nothing is on its way."""
        return not self._lost and all(request.Test() for request, _ in self._sent)

    def deliver(self, target: int, value: Any) -> None:
        """Send a value; does not wait."""
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

        def has_come() -> bool:
            return bool(self._comm.Iprobe(source, tags.DOCTOR_VALUES, status))

        try:
            if not wait_until(has_come, limit_sec, _MAX_NAP_SEC):
                raise NoAnswerError(f"has sent nothing for {limit_sec:.0f} s")
            content = bytearray(status.Get_count(MPI.BYTE))
            request = self._comm.Irecv([content, MPI.BYTE], source, tags.DOCTOR_VALUES)
            if not wait_until(request.Test, limit_sec, _MAX_NAP_SEC):
                self._lost = True
                keep_alive(request, content)
                raise NoAnswerError(f"has sent half a message in {limit_sec:.0f} s")
        except MPI.Exception as error:
            self._lost = True
            raise NoAnswerError(f"has died ({error})") from error
        return json.loads(content)

    def settle(self, limit_sec: float) -> bool:
        """Wait until everything sent has arrived; return whether it has."""
        return wait_until(lambda: self.is_clean, limit_sec, _MAX_NAP_SEC)
