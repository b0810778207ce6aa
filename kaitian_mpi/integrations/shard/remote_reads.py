"""Lets a rank read what other ranks own, whatever their scripts do meanwhile.

In a trainer, rank 0 alone may save, evaluate or generate while the others wait in a collective of
the script's own. So a thread of each rank answers.
"""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from kaitian_mpi.errors import CollectiveError, UserError
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.abort import abort_with_traceback
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.runtime.polling import keep_alive, nap, sleeping_barrier, wait_request, wait_until
from kaitian_mpi.train.state_transfer import get_state, get_tensor, put_state, put_tensor

if TYPE_CHECKING:
    from mpi4py import MPI


class ReadKind(IntEnum):
    """Of what another rank is asked for a part: the first of the numbers that name a state."""

    MODEL = 0
    """A model's rows."""
    OPTIMIZER = 1
    """The state of an optimizer's rows."""
    LENT = 2
    """What rank 0 has of a model before it has owners: see `LentParameters`."""


Serve = Callable[..., Any]
"""Returns the state that some numbers name: nested dicts and lists of tensors and plain values; or
`NOT_YET`."""
NOT_YET = object()
"""Returned by a rank whose script has not done the step yet of which a state is read."""


class RowValues(NamedTuple):
    """The values of consecutive rows of a tensor, or memory for them."""

    begin: int
    """The first row."""
    end: int
    """The row after the last."""
    values: torch.Tensor


_STATE, _ROWS = 0, 1  # what a reply is
_REQUEST = 0
_REPLIES = range(1, 16_384)
_MAX_NAP_SEC = 10e-3
_LONGEST_WAIT_SEC = 300.0


class _Request(NamedTuple):
    source: int
    """The rank that asks."""
    tag: int
    """The tag of the reply."""
    reply_kind: int
    """Whether the reply is a state or the rows of a tensor."""
    numbers: list[int]
    """What `serve` is called with."""
    since: float
    """When it arrived, by `time.monotonic`."""


class RemoteReads:
    """Reads from other ranks, and answers their reads in a thread."""

    def __init__(self, comm: MPI.Intracomm, serve: Serve) -> None:
        """Start to answer by `serve`, until all ranks have come to their exit. Collective."""
        self._comm: MPI.Intracomm = comm.Dup()
        self._serve = serve
        self._tags = itertools.cycle(_REPLIES)
        self._abandoned: set[int] = set()  # tags of replies that were not received to their end
        self._waiting: list[_Request] = []
        self._replies: list[MPI.Request] = []  # not received yet, with what they send
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kaitian-owner", daemon=True)
        self._thread.start()
        register_close(self.close, ends_work=True)

    def read(self, rank: int, *numbers: int) -> Any:
        """Return what a rank's `serve` returns for these numbers, in host memory.

        Of this rank itself, what its `serve` returns. Not collective.

        Raises:
            UserError: that rank cannot serve it.
            CollectiveError: that rank is lost.
        """
        if rank == self._comm.rank:
            state = self._serve(*numbers)
            assert state is not NOT_YET
            return state
        with self._asking(rank, _STATE, *numbers) as (receive, _):
            return get_state(receive)

    def read_rows(self, rank: int, *numbers: int, into: Sequence[RowValues]) -> None:
        """Read rows of a tensor, as which another rank's `serve` returns, into memory for them.

        Not collective.

        Args:
            rank: the rank that is asked, not this one.
            numbers: what its `serve` is called with.
            into: the rows, with their memory, on any device.

        Raises:
            UserError: that rank cannot serve it.
            CollectiveError: that rank is lost.
        """
        with self._asking(rank, _ROWS, *numbers) as (receive, forms):
            if forms != _forms(into):
                raise RuntimeError(f"rank {rank} owns other rows than those that were read from it")
            for rows in into:
                get_tensor(receive, rows.values)

    def close(self) -> None:
        """Answer until all ranks are here, and end the thread. Collective."""
        unregister_close(self.close)
        with ulfm.tolerating_loss():
            sleeping_barrier(self._comm)
        self._stop.set()
        self._thread.join()
        keep_alive(*self._replies)  # whose readers were interrupted

    @contextmanager
    def _asking(
        self, rank: int, reply_kind: int, *numbers: int
    ) -> Iterator[tuple[Callable[[np.ndarray], None], int]]:
        """Ask a rank, and yield what receives its reply, and the forms of the rows in that."""
        tag = next(tag for tag in self._tags if tag not in self._abandoned)
        receive = partial(self._receive, source=rank, tag=tag)
        request = np.array([tag, reply_kind, *numbers], dtype=np.int64)
        try:
            wait_request(self._comm.Isend(request, rank, _REQUEST))
            # The owner may still be in the step that this rank has done.
            wait_until(partial(self._comm.Iprobe, rank, tag), max_nap_sec=_MAX_NAP_SEC)
            receive(header := np.zeros(2, dtype=np.int64))
            length, forms = header.tolist()
            if not length:
                yield receive, forms
                return
            receive(fault := np.empty(length, dtype=np.uint8))
        except BaseException as error:
            self._abandoned.add(tag)  # a later reply would be taken for the rest of this one
            if ulfm.may_be_loss(error):
                raise CollectiveError(f"rank {rank}, which owns what was read, is lost") from error
            raise
        raise UserError(fault.tobytes().decode())

    def _receive(self, buffer: np.ndarray, source: int, tag: int) -> None:
        wait_request(self._comm.Irecv(buffer, source, tag))

    def _run(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        idle_since = time.monotonic()
        while not self._stop.is_set():
            try:
                if self._comm.Iprobe(MPI.ANY_SOURCE, _REQUEST, status):
                    self._waiting.append(self._receive_request(status))
                answered = [self._answer(request) for request in [*self._waiting]]
                if self._drop_received() or any(answered):
                    idle_since = time.monotonic()
            except MPI.Exception as error:
                if not ulfm.may_be_loss(error):
                    abort_with_traceback("a thread that answers other ranks failed:\n")
                self._comm.Ack_failed()  # the ranks that are left may still read
            except BaseException:  # without this thread other ranks would wait for a reply
                abort_with_traceback("a thread that answers other ranks failed:\n")
            nap(time.monotonic() - idle_since, _MAX_NAP_SEC)

    def _receive_request(self, status: MPI.Status) -> _Request:
        source = status.Get_source()
        numbers = np.empty(status.Get_count() // 8, dtype=np.int64)
        self._receive(numbers, source, _REQUEST)
        tag, reply_kind, *named_state = numbers.tolist()
        return _Request(source, tag, reply_kind, named_state, time.monotonic())

    def _answer(self, request: _Request) -> bool:
        """Answer a request, if its state is there; return whether it is answered."""

        def send(content: np.ndarray) -> None:
            # Nonblocking: a reader that was interrupted must not delay the replies to the others.
            self._replies.append(self._comm.Isend(content, request.source, request.tag))

        fault = ""
        try:
            state = self._serve(*request.numbers)
        except UserError as error:
            fault = str(error)
        if not fault and state is NOT_YET:
            if time.monotonic() - request.since < _LONGEST_WAIT_SEC:
                return False
            fault = (
                f"--layout shard: rank {self._comm.rank} has not reached the optimizer step that "
                f"rank {request.source} reads, after {_LONGEST_WAIT_SEC:.0f} s; call "
                "optimizer.step() and change parameters equally often on every rank"
            )
        self._waiting.remove(request)
        text = np.frombuffer(fault.encode(), dtype=np.uint8)
        are_rows = request.reply_kind == _ROWS and not fault
        send(np.array([text.size, _forms(state) if are_rows else 0], dtype=np.int64))
        if fault:
            send(text)
        elif are_rows:
            for rows in state:
                put_tensor(rows.values, send)
        else:
            put_state(state, send)
        return True

    def _drop_received(self) -> bool:
        """Drop the replies that have been received; return whether there were any."""
        before = len(self._replies)
        self._replies = [reply for reply in self._replies if not ulfm.is_done(reply)]
        return len(self._replies) < before


def _forms(pieces: Sequence[RowValues]) -> int:
    """Return a checksum of which rows some tensors are, with their dtypes and shapes."""
    forms = [(begin, end, str(t.dtype), tuple(t.shape)) for begin, end, t in pieces]
    return zlib.crc32(repr(forms).encode())
