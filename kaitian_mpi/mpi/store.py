"""A torch.distributed store whose server is a thread on rank 0, reached by MPI, not by TCP.

The server cannot answer while its rank is in a call that holds the GIL and may wait for the rank
that asks. So a request without an answer is not waited for, and a wait can be given up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from mpi4py import MPI

from kaitian_mpi.errors import RankLostError
from kaitian_mpi.mpi.store_server import (
    DEPARTED,
    LOST,
    NO_REPLY,
    OK,
    REJECTED,
    Fields,
    StoreServer,
    pack,
    unpack,
)
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.runtime.polling import wait_until
from kaitian_mpi.runtime.tags import STORE_REPLIES, STORE_REQUEST
from kaitian_mpi.runtime.ulfm import is_revoked, tolerating_loss, track_comm

_MAX_NAP_SEC = 5e-3
_MARGIN_SEC = 5.0  # for the server's answer after a request's own limit
_UNANSWERED = b"unanswered"
_CLOSED = "the store is closed: a rank is lost"


def _never() -> bool:
    return False


class StoreLink:
    """A rank's connection to the server. Thread-safe."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Start the server on rank 0 of `comm`. Collective."""
        self.comm = track_comm(comm.Dup())
        """The ranks that share the store."""
        self.is_closed = False
        self._tags = itertools.cycle(STORE_REPLIES)
        self._unanswered: set[int] = set()  # the tags of replies that nobody waits for
        self._server = StoreServer(self.comm) if comm.rank == 0 else None

    @property
    def is_lost(self) -> bool:
        """Whether the store can no longer be used: it is closed, or a rank is lost."""
        return self.is_closed or is_revoked(self.comm)

    def ask(
        self, operation: str, fields: Fields, limit_sec: float, until: Callable[[], bool] = _never
    ) -> Fields:
        """Send a request; return the status, perhaps `_UNANSWERED`, and the results."""
        if self._server is not None:
            replied: Future[Fields] = Future()
            self._server.submit(operation.encode(), fields, limit_sec, replied.set_result)
            return replied.result()
        if self.is_closed:
            return (LOST,)
        self._drop_late_replies()
        tag = next(tag for tag in self._tags if tag not in self._unanswered)
        self._send(operation, tag, fields, limit_sec)
        status = MPI.Status()

        def has_replied() -> bool:
            return self.comm.Iprobe(0, tag, status)

        give_up_sec = limit_sec + _MARGIN_SEC
        wait_until(lambda: has_replied() or until(), give_up_sec, max_nap_sec=_MAX_NAP_SEC)
        if not has_replied():
            self._unanswered.add(tag)
            return (_UNANSWERED,)
        return self._receive(tag, status)

    def tell(self, operation: str, fields: Fields) -> bytes:
        """Send a request that needs no answer, before this rank's later ones; return the status."""
        if self._server is not None:
            return self.ask(operation, fields, 0.0)[0]
        if self.is_closed:
            return LOST
        self._send(operation, NO_REPLY, fields, 0.0)
        return OK

    def close(self) -> None:
        """Disconnect; rank 0 waits until the others have or are lost. Safe to call again."""
        if self.is_closed:
            return
        if not is_revoked(self.comm):
            with tolerating_loss():
                self.tell("set", (DEPARTED + b"%d" % self.comm.rank, b""))
        self.is_closed = True
        if self._server is not None:
            self._server.close()
        self.comm.Free()

    def _send(self, operation: str, reply_tag: int, fields: Fields, limit_sec: float) -> None:
        request = pack((operation.encode(), b"%d" % reply_tag, str(limit_sec).encode(), *fields))
        self.comm.Send(request, 0, STORE_REQUEST)

    def _receive(self, tag: int, status: MPI.Status) -> Fields:
        """Receive a reply that was probed. It stays until then: no other thread uses its tag."""
        buffer = bytearray(status.Get_count())
        self.comm.Recv(buffer, 0, tag)
        return unpack(bytes(buffer))

    def _drop_late_replies(self) -> None:
        for tag in tuple(self._unanswered):
            status = MPI.Status()
            if self.comm.Iprobe(0, tag, status):
                with suppress(KeyError):  # another thread drops it
                    self._unanswered.remove(tag)
                    self._receive(tag, status)


DEFAULT_TIMEOUT = timedelta(minutes=30)


class MPIStore(dist.Store):
    """A `torch.distributed.Store` over MPI.

    Keep a Python reference to it as long as torch uses it: torch references only the C++ object.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | StoreLink,
        timeout: timedelta = DEFAULT_TIMEOUT,
        prefix: str = "",
    ) -> None:
        """Start the server on rank 0 of `comm`. Collective, unless given another's link."""
        super().__init__()
        self._timeout = timeout
        self._prefix = prefix
        if isinstance(comm, StoreLink):
            self.link = comm
        else:
            self._start(comm)

    def _start(self, comm: MPI.Intracomm) -> None:
        self.link = StoreLink(comm)
        self._sessions = 0
        self._session = self
        register_close(self.close)

    def restart(self, comm: MPI.Intracomm) -> None:
        """Close the store, if it is open, and begin an empty one of these ranks. Collective."""
        self.close()
        self._start(comm)

    def next_session(self, timeout: timedelta | None) -> MPIStore:
        """Return an empty store for a rendezvous. Every rank must call it equally often."""
        self._sessions += 1
        name = f"session {self._sessions}"
        self._session = self.view(name, timeout or DEFAULT_TIMEOUT)  # torch keeps no reference
        return self._session

    def view(self, prefix: str, timeout: timedelta = DEFAULT_TIMEOUT) -> MPIStore:
        """Return a store on the same server with its own key prefix. Not collective."""
        return MPIStore(self.link, timeout, f"{self._prefix}{prefix}/")

    def close(self) -> None:
        """Disconnect; rank 0 waits for the others, unless one is lost. Safe to call again."""
        unregister_close(self.close)
        self.link.close()

    def departed(self, until: Callable[[], bool] = _never) -> list[int]:
        """Return the ranks whose script has ended; none if `until` stops the wait for an answer."""
        return [*map(int, self.items(DEPARTED.decode(), until))]

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key. As with torch's TCPStore, the server may do it a moment later."""
        if self.link.tell("set", (_as_bytes(self._prefix + key), _as_bytes(value))) == LOST:
            raise RankLostError(_CLOSED)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str) -> bytes:
        return self._ask("get", self._prefix + key)[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, 0 if new, and return its new value."""
        return int(self._ask("add", self._prefix + key, str(amount))[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if its value is `expected`; return its value afterwards."""
        return self._ask("compare_set", self._prefix + key, expected, desired)[0]

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", *self._placed(keys))[0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set; a `DistStoreError` after the timeout."""
        self._ask("wait", *self._placed(keys), timeout=timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", self._prefix + key)[0])

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        return list(self.items(""))

    def items(self, prefix: str, until: Callable[[], bool] = _never) -> dict[str, bytes]:
        """Return keys without this prefix, and their values; none if `until` stops the wait."""
        prefix = self._prefix + prefix
        items = self._ask("items", prefix, until=until)
        keys = [key.decode().removeprefix(prefix) for key in items[::2]]
        return dict(zip(keys, items[1::2], strict=True))

    # torch's C++ code calls these two by their C++ names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def clone(self) -> MPIStore:
        """Return this store itself: it is thread-safe."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:  # type: ignore[override]
        return self._timeout

    def _placed(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]

    def _ask(
        self,
        operation: str,
        *arguments: str | bytes,
        timeout: timedelta | None = None,
        until: Callable[[], bool] = _never,
    ) -> Fields:
        fields = tuple(map(_as_bytes, arguments))
        limit_sec = (timeout or self._timeout).total_seconds()
        status, *result = self.link.ask(operation, fields, limit_sec, until)
        if status == OK or (status == _UNANSWERED and until is not _never):
            return tuple(result)
        if status == LOST:
            raise RankLostError(_CLOSED)
        if status == _UNANSWERED:
            raise dist.DistStoreError(
                f"rank 0, which serves the store, has not answered within {limit_sec:g} s; it may "
                "be in a call that does not let Python run, such as mpi4py's first comm.allreduce"
            )
        keys = fields if operation in ("get", "wait") else fields[:1]
        names = ", ".join(key.decode().removeprefix(self._prefix) for key in keys)
        reason = f"not set by any rank within {limit_sec:g} s"
        if status == REJECTED:
            reason = result[0].decode()
        raise dist.DistStoreError(f"store key {names}: {reason}")


def _as_bytes(argument: str | bytes) -> bytes:
    if isinstance(argument, str):
        return argument.encode()
    if isinstance(argument, bytes | bytearray | memoryview):
        return bytes(argument)
    raise TypeError(f"a store holds str or bytes, not {type(argument).__name__}")
