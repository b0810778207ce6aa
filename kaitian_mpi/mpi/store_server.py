"""The store's server: a table of keys and values, and the thread that serves it."""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpi4py import MPI

from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.abort import abort_with_traceback
from kaitian_mpi.runtime.polling import keep_alive, wait_until
from kaitian_mpi.runtime.tags import STORE_REQUEST

OK = b"ok"
TIMED_OUT = b"timed out"
REJECTED = b"rejected"
LOST = b"lost"
NO_REPLY = -1  # in place of the tag of a reply
DEPARTED = b"\0departed/"  # the keys, hidden from users, that ranks set as they disconnect

Fields = tuple[bytes, ...]


def pack(fields: Sequence[bytes]) -> bytes:
    """Serialize byte strings to one message: their count, their lengths, their contents."""
    lengths = [len(field) for field in fields]
    return struct.pack(f"<{len(fields) + 1}Q", len(fields), *lengths) + b"".join(fields)


def unpack(message: bytes) -> Fields:
    """Deserialize a message made by `pack`."""
    (count,) = struct.unpack_from("<Q", message)
    lengths = struct.unpack_from(f"<{count}Q", message, 8)
    ends = list(itertools.accumulate(lengths, initial=8 * (count + 1)))
    return tuple(message[start:end] for start, end in itertools.pairwise(ends))


def apply(values: dict[bytes, bytes], operation: bytes, arguments: Fields) -> Fields:
    """Carry out an operation of a store on its keys and values; return the results."""
    match operation, arguments:
        case b"set", (key, value):
            values[key] = value
        case b"get", (key,):
            return (values[key],)
        case b"add", (key, amount):
            current = values.get(key, b"0")
            try:
                values[key] = b"%d" % (int(current) + int(amount))
            except ValueError:
                raise ValueError(f"its value {current[:40]!r} is not a number") from None
            return (values[key],)
        case b"compare_set", (key, expected, desired):
            # As in torch's TCPStore: a missing key is set only if the expected value is empty.
            if values.get(key, b"") == expected:
                values[key] = desired
            return (values.get(key, expected),)
        case b"check", keys:
            return (b"1" if values.keys() >= set(keys) else b"",)
        case b"delete", (key,):
            return (b"1" if values.pop(key, None) is not None else b"",)
        case b"items", (prefix,):
            is_hidden = prefix.startswith(DEPARTED)
            matching = [key for key in values if key.startswith(prefix)]
            shown = (key for key in matching if key.startswith(DEPARTED) == is_hidden)
            return tuple(itertools.chain.from_iterable((key, values[key]) for key in shown))
    return ()


class _Pending(NamedTuple):
    """A `get` or `wait` request whose keys are not all set yet."""

    operation: bytes
    keys: Fields
    deadline: float
    reply: Callable[[Fields], None]


class StoreServer:
    """The thread that serves the table; it polls ever less often, so that it takes no core."""

    _MIN_POLL_SEC, _MAX_POLL_SEC = 20e-6, 50e-3
    _LAST_REPLIES_SEC = 2.0

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._values: dict[bytes, bytes] = {}
        self._pending: list[_Pending] = []
        self._replies: list[tuple[MPI.Request, bytes]] = []
        self._lock = threading.Lock()
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kaitian-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread once every other rank has disconnected or is lost, and join it."""
        wait_until(self._is_alone, max_nap_sec=self._MAX_POLL_SEC)
        self._stop.set()
        self._thread.join()

    def submit(
        self,
        operation: bytes,
        arguments: Fields,
        timeout_sec: float,
        reply: Callable[[Fields], None],
    ) -> None:
        """Reply to a request now, or once the keys it waits for are set, or when it times out."""
        with self._lock:
            if self._lost:
                reply((LOST,))
                return
            if operation in (b"get", b"wait") and not self._values.keys() >= set(arguments):
                deadline = time.monotonic() + timeout_sec
                self._pending.append(_Pending(operation, arguments, deadline, reply))
                return
            try:
                result = apply(self._values, operation, arguments)
            except Exception as error:  # caused by one rank's request, and reported to that rank
                reply((REJECTED, str(error).encode()))
                return
            reply((OK, *result))
            self._reply_to_pending()

    def _reply_to_pending(self) -> None:
        waiting: list[_Pending] = []
        for request in self._pending:
            if self._values.keys() >= set(request.keys):
                request.reply((OK, *apply(self._values, request.operation, request.keys)))
            elif time.monotonic() > request.deadline:
                request.reply((TIMED_OUT,))
            else:
                waiting.append(request)
        self._pending = waiting

    def _is_alone(self) -> bool:
        with self._lock:
            if self._lost or not self._thread.is_alive():
                return True
            keys = apply(self._values, b"items", (DEPARTED,))[::2]
        departed = {int(key.removeprefix(DEPARTED)) for key in keys}
        others = set(range(self._comm.size)) - departed - {self._comm.rank}
        return not others or (ulfm.is_enabled() and ulfm.have_failed(self._comm, others))

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._poll_requests()
                except MPI.Exception as error:
                    if not ulfm.may_be_loss(error):
                        raise
                    if ulfm.is_revoked(self._comm):
                        self._give_up()
                        return
                    # The others may still need the table until a rank revokes the communicator.
                    self._comm.Ack_failed()
                    self._stop.wait(self._MAX_POLL_SEC)
            if not wait_until(self._drop_sent_replies, self._LAST_REPLIES_SEC):
                keep_alive(self._replies)
        except BaseException:  # without this thread every rank would wait for a reply
            abort_with_traceback("the store failed:\n")

    def _give_up(self) -> None:
        """Fail pending requests: the keys they wait for may have been a lost rank's to set."""
        with self._lock:
            self._lost = True
            for request in self._pending:
                request.reply((LOST,))
            self._pending = []

    def _poll_requests(self) -> None:
        last = time.monotonic()
        status = MPI.Status()
        while not self._stop.is_set():
            message = self._comm.Improbe(MPI.ANY_SOURCE, STORE_REQUEST, status)
            if message is not None:
                self._receive(message, status)
                last = time.monotonic()
                continue
            with self._lock:
                self._reply_to_pending()
                self._drop_sent_replies()
            idle_sec = time.monotonic() - last
            self._stop.wait(min(max(idle_sec / 10, self._MIN_POLL_SEC), self._MAX_POLL_SEC))

    def _receive(self, message: MPI.Message, status: MPI.Status) -> None:
        buffer = bytearray(status.Get_count())
        message.Recv(buffer)
        operation, tag, timeout, *arguments = unpack(bytes(buffer))
        source = status.Get_source()
        reply_tag = int(tag)

        def reply(fields: Fields) -> None:
            if reply_tag == NO_REPLY:
                return
            message = pack(fields)
            with ulfm.tolerating_loss():  # of the receiver
                # Nonblocking: a stopped rank must not delay the replies to the others.
                self._replies.append((self._comm.Isend(message, source, reply_tag), message))

        self.submit(operation, tuple(arguments), float(timeout), reply)

    def _drop_sent_replies(self) -> bool:
        self._replies = [item for item in self._replies if not ulfm.is_done(item[0])]
        return not self._replies
