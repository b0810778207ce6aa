"""The server of the store: a table, and the thread that answers for it."""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpi4py import MPI

from kaitian_mpi.runtime.abort import end_with_traceback
from kaitian_mpi.runtime.polling import abandon, wait_until
from kaitian_mpi.runtime.tags import STORE_REQUEST
from kaitian_mpi.runtime.ulfm import are_lost, is_loss, is_on, is_revoked

OK, TIMED_OUT, REFUSED, LOST = b"ok", b"timed out", b"refused", b"lost"

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
        current = self._values.get(key, b"0")
        try:
            total = b"%d" % (int(current) + int(amount))
        except ValueError:
            raise ValueError(f"its value {current[:40]!r} is not a number") from None
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

    def _list(self, prefix: bytes) -> Fields:
        return tuple(key for key in self._values if key.startswith(prefix))

    def _count(self, prefix: bytes) -> Fields:
        return (b"%d" % len(self._list(prefix)),)

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
    _LAST_REPLIES_SEC = 2.0

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._table = Table()
        self._pending: list[_Pending] = []
        self._replies: list[tuple[MPI.Request, bytes]] = []
        self._departed: set[int] = set()
        self._lock = threading.Lock()
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kaitian-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread once every other rank has departed or is lost, and wait for its end."""
        wait_until(self._is_alone, longest_nap_sec=self._LONGEST_SEC)
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
            if self._lost:
                reply((LOST,))
                return
            if operation in (b"get", b"wait") and not self._table.has(arguments):
                deadline = time.monotonic() + timeout_sec
                self._pending.append(_Pending(operation, arguments, deadline, reply))
                return
            try:
                result = self._carry_out(operation, arguments)
            except Exception as error:  # the fault of one rank's request, and told to that rank
                reply((REFUSED, str(error).encode()))
                return
            reply((OK, *result))
            self._answer_pending()

    def _carry_out(self, operation: bytes, arguments: Fields) -> Fields:
        if operation == b"depart":
            self._departed.add(int(arguments[0]))
            return ()
        if operation == b"departed":
            return tuple(b"%d" % rank for rank in sorted(self._departed))
        return self._table.apply(operation, arguments)

    def _answer_pending(self) -> None:
        still: list[_Pending] = []
        for request in self._pending:
            if self._table.has(request.keys):
                request.reply((OK, *self._table.apply(request.operation, request.keys)))
            elif time.monotonic() > request.deadline:
                request.reply((TIMED_OUT,))
            else:
                still.append(request)
        self._pending = still

    def _is_alone(self) -> bool:
        """Return whether no other rank will ask for anything any more."""
        with self._lock:
            if self._lost or not self._thread.is_alive():
                return True
            others = set(range(self._comm.size)) - self._departed - {self._comm.rank}
        return not others or (is_on() and are_lost(self._comm, sorted(others)))

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._look_for_requests()
                except MPI.Exception as error:
                    if not is_loss(error):
                        raise
                    if is_revoked(self._comm):
                        self._give_up()
                        return
                    # The others may still need the table until somebody revokes the communicator.
                    self._comm.Ack_failed()
                    self._stop.wait(self._LONGEST_SEC)
            self._finish_replies()
        except BaseException:  # without this thread every rank would wait for an answer
            end_with_traceback("the store failed:\n")

    def _give_up(self) -> None:
        """Let nobody on this rank wait for a key that a lost rank should have set."""
        with self._lock:
            self._lost = True
            for request in self._pending:
                request.reply((LOST,))
            self._pending = []

    def _look_for_requests(self) -> None:
        pause = self._SHORTEST_SEC
        status = MPI.Status()
        while not self._stop.is_set():
            message = self._comm.Improbe(MPI.ANY_SOURCE, STORE_REQUEST, status)
            if message is not None:
                self._receive(message, status)
                pause = self._SHORTEST_SEC
                continue
            with self._lock:
                self._answer_pending()
                self._forget_sent_replies()
            self._stop.wait(pause)
            pause = min(2 * pause, self._LONGEST_SEC)

    def _receive(self, message: MPI.Message, status: MPI.Status) -> None:
        buffer = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([buffer, MPI.BYTE])
        operation, tag, timeout, *arguments = unpack(bytes(buffer))
        source, reply_tag = status.Get_source(), int(tag)

        def reply(fields: Fields) -> None:
            answer = pack(fields)
            try:
                # Nonblocking: a rank that is stopped must not keep the answers from the others.
                sent = self._comm.Isend([answer, MPI.BYTE], source, reply_tag)
            except MPI.Exception as error:
                if not is_loss(error):  # else there is nobody to answer to
                    raise
            else:
                self._replies.append((sent, answer))

        self.submit(operation, tuple(arguments), float(timeout), reply)

    def _forget_sent_replies(self) -> bool:
        """Drop the replies that have been sent; return whether that is all of them."""
        self._replies = [item for item in self._replies if not _is_over(item[0])]
        return not self._replies

    def _finish_replies(self) -> None:
        if not wait_until(self._forget_sent_replies, self._LAST_REPLIES_SEC):
            abandon(self._replies)


def _is_over(request: MPI.Request) -> bool:
    try:
        return bool(request.Test())
    except MPI.Exception as error:
        if not is_loss(error):
            raise
        return True
