"""A torch.distributed store whose server is a thread on rank 0, reached by MPI messages.

There is no TCP port and nothing to authenticate: only ranks of the job can send to it. It serves
torch's own bookkeeping and the bootstrap of the vendors' libraries.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from mpi4py import MPI

from kaitian_mpi.errors import RankLostError
from kaitian_mpi.mpi.fault_tolerance import is_revoked, track
from kaitian_mpi.mpi.runtime import close_at_exit, closed_early
from kaitian_mpi.mpi.store_server import (
    LOST,
    REQUEST_TAG,
    TIMED_OUT,
    Fields,
    StoreServer,
    pack,
    unpack,
)
from kaitian_mpi.mpi.waiting import wait_quietly

_FIRST_REPLY_TAG = REQUEST_TAG + 1
_REPLY_TAGS = 16_384  # MPI promises tags up to 32,767
DEFAULT_TIMEOUT = timedelta(minutes=30)


class MPIStore(dist.Store):
    """The store as each rank sees it.

    Keep a Python reference to it as long as torch uses it: torch's own is to the C++ half only.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """Start the server on rank 0 of `comm`. Collective."""
        super().__init__()
        self._comm = track(comm.Dup())
        self._timeout = timeout
        self._tags = itertools.count()
        self._server = StoreServer(self._comm) if comm.rank == 0 else None
        self._closed = False
        close_at_exit(self.close)

    def close(self) -> None:
        """Stop the server once every rank has come here. Collective; safe to call again.

        After the loss of a rank nobody is waited for.
        """
        if self._closed:
            return
        self._closed = True
        closed_early(self.close)
        if not is_revoked(self._comm):
            wait_quietly(self._comm)
        if self._server is not None:
            self._server.close()
        self._comm.Free()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting for it up to the store's time-out."""
        with _explained(key):
            return self._ask("get", key)[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, 0 if new, and return its value."""
        return int(self._ask("add", key, str(amount))[0])

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a key's value."""
        self._ask("append", key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it holds `expected`; return what it holds afterwards."""
        return self._ask("compare_set", key, expected, desired)[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._ask("check", *keys)[0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            DistStoreError: they are not within the time-out.
        """
        with _explained(", ".join(keys)):
            self._ask("wait", *keys, timeout=timeout)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values, waiting for them."""
        with _explained(", ".join(keys)):
            return list(self._ask("get", *keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys at once."""
        self._ask("set", *itertools.chain.from_iterable(zip(keys, values, strict=True)))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        return bool(self._ask("delete", key)[0])

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._ask("count")[0])

    def list_keys(self) -> list[str]:
        """Return all keys."""
        return [key.decode() for key in self._ask("list")]

    # torch's C++ side asks for these two by their C++ names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are there."""
        return True

    hasExtendedApi = has_extended_api  # noqa: N815

    def clone(self) -> MPIStore:
        """Return this store: any number of threads may share it."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` and `wait` wait."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:  # type: ignore[override]
        """How long `get` and `wait` wait."""
        return self._timeout

    def _ask(
        self, operation: str, *arguments: str | bytes, timeout: timedelta | None = None
    ) -> Fields:
        fields = tuple(a.encode() if isinstance(a, str) else bytes(a) for a in arguments)
        limit_sec = (timeout or self._timeout).total_seconds()
        if self._server is not None:
            status, *result = self._ask_here(self._server, operation, fields, limit_sec)
        else:
            status, *result = self._ask_by_message(operation, fields, limit_sec)
        if status == TIMED_OUT:
            raise dist.DistStoreError(f"not set by any rank within {limit_sec:g} s")
        if status == LOST:
            raise RankLostError("the store has ended: a rank is lost")
        return tuple(result)

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
        tag = _FIRST_REPLY_TAG + next(self._tags) % _REPLY_TAGS
        request = pack((operation.encode(), b"%d" % tag, str(limit_sec).encode(), *fields))
        self._comm.Send([request, MPI.BYTE], 0, REQUEST_TAG)
        pause = 20e-6
        status = MPI.Status()
        while (message := self._comm.Improbe(0, tag, status)) is None:
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
        buffer = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([buffer, MPI.BYTE])
        return unpack(bytes(buffer))


@contextmanager
def _explained(keys: str) -> Iterator[None]:
    try:
        yield
    except dist.DistStoreError as error:
        raise dist.DistStoreError(f"store key {keys}: {error}") from None
