"""A rank's way to the store's server: in this process on rank 0, by MPI messages elsewhere."""

from __future__ import annotations

import itertools
import threading
import time

from mpi4py import MPI

from kaitian_mpi.mpi.fault_tolerance import is_loss, is_revoked, track
from kaitian_mpi.mpi.store_server import (
    LOST,
    REQUEST_TAG,
    Fields,
    StoreServer,
    pack,
    unpack,
)

_FIRST_REPLY_TAG = REQUEST_TAG + 1
_REPLY_TAGS = 16_384  # MPI promises tags up to 32,767
_SHORTEST_SEC, _LONGEST_SEC = 20e-6, 5e-3


class StoreLink:
    """Asks the server. Any number of threads may use it at once."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Start the server on rank 0 of `comm`. Collective."""
        self.comm = track(comm.Dup())
        """The ranks that share the store."""
        self.is_closed = False
        self._tags = itertools.count()
        self._server = StoreServer(self.comm) if comm.rank == 0 else None

    @property
    def is_lost(self) -> bool:
        """Whether the store is of no use any more: it is closed, or a rank is lost."""
        return self.is_closed or is_revoked(self.comm)

    def ask(self, operation: str, fields: Fields, limit_sec: float) -> Fields:
        """Return the server's answer: its status, and the results."""
        if self._server is not None:
            return self._ask_here(self._server, operation, fields, limit_sec)
        return self._ask_by_message(operation, fields, limit_sec)

    def close(self) -> None:
        """Depart; rank 0 stops the server once every other rank has departed or is lost.

        The other ranks wait for nobody. Safe to call again.
        """
        if self.is_closed:
            return
        if not is_revoked(self.comm):
            self._depart()
        self.is_closed = True
        if self._server is not None:
            self._server.close()
        self.comm.Free()

    def _depart(self) -> None:
        try:
            self.ask("depart", (b"%d" % self.comm.rank,), 0.0)
        except MPI.Exception as error:
            if not is_loss(error):
                raise

    def _ask_here(
        self, server: StoreServer, operation: str, fields: Fields, limit_sec: float
    ) -> Fields:
        answered = threading.Event()
        answer: list[Fields] = []

        def reply(result: Fields) -> None:
            answer.append(result)
            answered.set()

        server.submit(operation.encode(), fields, limit_sec, reply)
        answered.wait()
        return answer[0]

    def _ask_by_message(self, operation: str, fields: Fields, limit_sec: float) -> Fields:
        if self.is_closed:
            return (LOST,)
        tag = _FIRST_REPLY_TAG + next(self._tags) % _REPLY_TAGS
        request = pack((operation.encode(), b"%d" % tag, str(limit_sec).encode(), *fields))
        self.comm.Send([request, MPI.BYTE], 0, REQUEST_TAG)
        pause = _SHORTEST_SEC
        status = MPI.Status()
        while (message := self.comm.Improbe(0, tag, status)) is None:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SEC)
        buffer = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([buffer, MPI.BYTE])
        return unpack(bytes(buffer))
