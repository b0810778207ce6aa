"""Lets a rank read what other ranks own, whatever their scripts do meanwhile.

In a trainer, rank 0 alone may save, evaluate or generate while the others wait in a collective of
the script's own. So a thread of each rank answers.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kaitian_mpi.errors import CollectiveError, UserError
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.abort import abort_with_traceback
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.runtime.polling import nap, sleeping_barrier, wait_request, wait_until
from kaitian_mpi.train.state_transfer import get_state, put_state

if TYPE_CHECKING:
    from mpi4py import MPI

Serve = Callable[..., Any]
"""Returns the state that some numbers name: nested dicts and lists of tensors and plain values; or
`NOT_YET`."""
NOT_YET = object()
"""Returned by a rank whose script has not done the step yet of which a state is read."""

_REQUEST = 0
_REPLIES = range(1, 16_384)
_MAX_NAP_SEC = 10e-3
_LONGEST_WAIT_SEC = 300.0


class _Request(NamedTuple):
    source: int
    """The rank that asks."""
    tag: int
    """Of the reply."""
    numbers: list[int]
    """What `serve` is called with."""
    since: float
    """When it arrived, by `time.monotonic`."""


class OwnerReads:
    """Reads from other ranks, and answers their reads in a thread."""

    def __init__(self, comm: MPI.Intracomm, serve: Serve) -> None:
        """Start to answer by `serve`, until all ranks have come to their exit. Collective."""
        self._comm: MPI.Intracomm = comm.Dup()
        self._serve = serve
        self._tags = itertools.cycle(_REPLIES)
        self._waiting: list[_Request] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kaitian-owner", daemon=True)
        self._thread.start()
        register_close(self.close, ends_work=True)

    def read(self, rank: int, *numbers: int) -> Any:
        """Return what a rank's `serve` returns for these numbers, in host memory.

        Not collective.

        Raises:
            UserError: that rank cannot serve it.
            CollectiveError: that rank is lost.
        """
        if rank == self._comm.rank:
            state = self._serve(*numbers)
            assert state is not NOT_YET
            return state
        tag = next(self._tags)
        receive = partial(self._receive, source=rank, tag=tag)
        try:
            wait_request(
                self._comm.Isend(np.array([tag, *numbers], dtype=np.int64), rank, _REQUEST)
            )
            # The owner may still be in the step that this rank has done.
            wait_until(partial(self._comm.Iprobe, rank, tag), max_nap_sec=_MAX_NAP_SEC)
            receive(length := np.zeros(1, dtype=np.int64))
            if not length[0]:
                return get_state(receive)
            receive(fault := np.empty(int(length[0]), dtype=np.uint8))
        except Exception as error:
            if ulfm.may_be_loss(error):
                raise CollectiveError(f"rank {rank}, which owns what was read, is lost") from error
            raise
        raise UserError(fault.tobytes().decode())

    def close(self) -> None:
        """Answer until all ranks are here, and end the thread. Collective."""
        unregister_close(self.close)
        with ulfm.tolerating_loss():
            sleeping_barrier(self._comm)
        self._stop.set()
        self._thread.join()

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
                if any(answered):
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
        tag, *named_state = numbers.tolist()
        return _Request(source, tag, named_state, time.monotonic())

    def _answer(self, request: _Request) -> bool:
        """Answer a request, if its state is there; return whether it is answered."""

        def send(content: np.ndarray) -> None:
            wait_request(self._comm.Isend(content, request.source, request.tag))

        fault = ""
        try:
            state = self._serve(*request.numbers)
        except UserError as error:
            fault = str(error)
        if not fault and state is NOT_YET:
            if time.monotonic() - request.since < _LONGEST_WAIT_SEC:
                return False
            fault = (
                f"--layout shard: rank {request.source} waited {_LONGEST_WAIT_SEC:.0f} s for rank "
                f"{self._comm.rank} to come as far; every rank must change parameters, and step "
                "optimizers, as often as the others"
            )
        self._waiting.remove(request)
        text = np.frombuffer(fault.encode(), dtype=np.uint8)
        send(np.array([text.size], dtype=np.int64))
        if fault:
            send(text)
        else:
            put_state(state, send)
        return True
