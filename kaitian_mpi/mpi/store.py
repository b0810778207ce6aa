"""A torch.distributed store whose server is a thread on rank 0, reached by MPI messages.

There is no TCP port and nothing to authenticate: only ranks of the job can send to it. It serves
torch's own bookkeeping and the bootstrap of the vendors' libraries.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from mpi4py import MPI

from kaitian_mpi.mpi.runtime import close_at_exit, wait_quietly

if TYPE_CHECKING:
    from collections.abc import Callable

_REQUEST_TAG = 1
_FIRST_REPLY_TAG = 2
_REPLY_TAGS = 16_384  # MPI promises tags up to 32,767
DEFAULT_TIMEOUT = timedelta(minutes=30)
_OK, _TIMED_OUT = b"ok", b"timed out"

Fields = tuple[bytes, ...]


def pack(fields: Sequence[bytes]) -> bytes:
    """Frame byte strings as one message: a count, the lengths, the bytes."""
    lengths = [len(field) for field in fields]
    return struct.pack(f"<{len(fields) + 1}Q", len(fields), *lengths) + b"".join(fields)


def unpack(message: bytes) -> Fields:
    """Take apart what `pack` made."""
    (count,) = struct.unpack_from("<Q", message)
    lengths = struct.unpack_from(f"<{count}Q", message, 8)
    ends = list(itertools.accumulate(lengths, initial=8 * (count + 1)))
    return tuple(message[start:end] for start, end in itertools.pairwise(ends))


class Table:
    """The keys and values, with the operations of a store. One thread at a time may use it."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}

    def apply(self, operation: bytes, arguments: Fields) -> Fields:
        """Carry out one operation and return its results."""
        method: Callable[..., Fields] = getattr(self, f"_{operation.decode()}")
        return method(*arguments)

    def has(self, keys: Sequence[bytes]) -> bool:
        """Return whether every key is there."""
        return all(key in self._values for key in keys)

    def _set(self, *pairs: bytes) -> Fields:
        self._values.update(zip(pairs[::2], pairs[1::2], strict=True))
        return ()

    def _get(self, *keys: bytes) -> Fields:
        return tuple(self._values[key] for key in keys)

    def _add(self, key: bytes, amount: bytes) -> Fields:
        total = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
        self._values[key] = total
        return (total,)

    def _append(self, key: bytes, value: bytes) -> Fields:
        self._values[key] = self._values.get(key, b"") + value
        return ()

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> Fields:
        # As torch's TCPStore: an absent key is set only if nothing was expected there.
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._values[key] = current = desired
        return (expected if current is None else current,)

    def _check(self, *keys: bytes) -> Fields:
        return (b"1" if self.has(keys) else b"",)

    def _delete(self, key: bytes) -> Fields:
        return (b"1" if self._values.pop(key, None) is not None else b"",)

    def _count(self) -> Fields:
        return (b"%d" % len(self._values),)

    def _list(self) -> Fields:
        return tuple(self._values)

    def _wait(self, *_: bytes) -> Fields:
        return ()


@dataclass
class _Pending:
    """A request that waits for keys: `get` and `wait`."""

    operation: bytes
    keys: Fields
    deadline: float
    reply: Callable[[Fields], None]


class StoreServer:
    """The thread that owns the table.

    It looks for messages at intervals that grow from 20 microseconds to 10 ms while nothing comes,
    so that it takes no core from the training.
    """

    _SHORTEST_SEC, _LONGEST_SEC = 20e-6, 10e-3

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._table = Table()
        self._pending: list[_Pending] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kaitian-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._stop.set()
        self._thread.join()

    def submit(
        self,
        operation: bytes,
        arguments: Fields,
        timeout_sec: float,
        reply: Callable[[Fields], None],
    ) -> None:
        """Answer a request now, or when the keys it waits for are there, or its time is over."""
        with self._lock:
            if operation in (b"get", b"wait") and not self._table.has(arguments):
                deadline = time.monotonic() + timeout_sec
                self._pending.append(_Pending(operation, arguments, deadline, reply))
                return
            reply((_OK, *self._table.apply(operation, arguments)))
            self._answer_pending()

    def _answer_pending(self) -> None:
        still: list[_Pending] = []
        for request in self._pending:
            if self._table.has(request.keys):
                request.reply((_OK, *self._table.apply(request.operation, request.keys)))
            elif time.monotonic() > request.deadline:
                request.reply((_TIMED_OUT,))
            else:
                still.append(request)
        self._pending = still

    def _serve(self) -> None:
        pause = self._SHORTEST_SEC
        status = MPI.Status()
        while not self._stop.is_set():
            message = self._comm.Improbe(MPI.ANY_SOURCE, _REQUEST_TAG, status)
            if message is not None:
                self._receive(message, status)
                pause = self._SHORTEST_SEC
                continue
            with self._lock:
                self._answer_pending()
            time.sleep(pause)
            pause = min(2 * pause, self._LONGEST_SEC)

    def _receive(self, message: MPI.Message, status: MPI.Status) -> None:
        buffer = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([buffer, MPI.BYTE])
        operation, tag, timeout, *arguments = unpack(bytes(buffer))
        source, reply_tag = status.Get_source(), int(tag)

        def reply(fields: Fields) -> None:
            self._comm.Send([pack(fields), MPI.BYTE], source, reply_tag)

        self.submit(operation, tuple(arguments), float(timeout), reply)


class MPIStore(dist.Store):
    """The store as each rank sees it.

    Keep a Python reference to it as long as torch uses it: torch's own is to the C++ half only.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """Start the server on rank 0 of `comm`. Collective."""
        super().__init__()
        self._comm = comm.Dup()
        self._timeout = timeout
        self._tags = itertools.count()
        self._server = StoreServer(self._comm) if comm.rank == 0 else None
        self._closed = False
        close_at_exit(self.close)

    def close(self) -> None:
        """Stop the server once every rank has come here. Collective; safe to call again."""
        if self._closed:
            return
        self._closed = True
        wait_quietly(self._comm)
        if self._server is not None:
            self._server.close()

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
        if status == _TIMED_OUT:
            raise dist.DistStoreError(f"not set by any rank within {limit_sec:g} s")
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
        self._comm.Send([request, MPI.BYTE], 0, _REQUEST_TAG)
        pause = 20e-6
        status = MPI.Status()
        while (message := self._comm.Improbe(0, tag, status)) is None:
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
        buffer = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([buffer, MPI.BYTE])
        return unpack(bytes(buffer))


@contextmanager
def _explained(keys: str) -> Iterator[Any]:
    try:
        yield
    except dist.DistStoreError as error:
        raise dist.DistStoreError(f"store key {keys}: {error}") from None
