"""Compares what the ranks' scripts do with their models, as each of it has collectives.

Collectives match by their order alone. If one rank has a micro-batch more than another, its
gradients would be summed with whatever the other one sends next.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight.verdict import by_value
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.runtime.polling import WaitContext, keep_alive, wait_request

if TYPE_CHECKING:
    from mpi4py import MPI

_SPEAKER_SEC = 10.0


class ScriptCall(IntEnum):
    """What a script does next; the same on all ranks."""

    ADD = 0
    SUM = 1
    STEP = 2
    NORM = 3
    UNSCALE = 4
    END = 5

    def __str__(self) -> str:
        return (
            *("backward() under no_sync()", "backward()", "optimizer.step()"),
            *("get_total_norm()", "scaler.unscale_()", "the script's end"),
        )[self]


class _Announced(NamedTuple):
    request: MPI.Request
    sent: np.ndarray
    by_rank: np.ndarray
    """The call of each rank and the index of its model."""
    steps: int

    @property
    def is_backward(self) -> bool:
        return int(self.sent[0]) in (ScriptCall.ADD, ScriptCall.SUM)


class ScriptCalls:
    """Tells the other ranks what this one's script does, and compares it with what theirs do."""

    def __init__(self, comm: MPI.Intracomm, waits: WaitContext) -> None:
        """Collective: duplicate the communicator.

        `waits` makes the context of waiting for other ranks.
        """
        self._waits = waits
        self._comm = comm.Dup()
        self._announced: deque[_Announced] = deque()  # not compared yet
        self._lock = threading.RLock()
        register_close(self.close)

    def announce(self, call: ScriptCall, model: int, steps: int) -> None:
        """Tell the other ranks what comes next, without waiting for them. Collective.

        Args:
            call: what comes next.
            model: the index of the model that it is of.
            steps: how many optimizer steps the model has had.
        """
        sent = np.array([call, model], dtype=np.int64)
        by_rank = np.empty((self._comm.size, sent.size), dtype=np.int64)
        with self._lock:
            request = self._comm.Iallgather(sent, by_rank)
            self._announced.append(_Announced(request, sent, by_rank, steps))

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Wait for collectives in the block, after a `check` that the other ranks have the same."""
        with self._waits(name):
            self.check()
            yield

    @contextmanager
    def waiting_in_round(self, name: str) -> Iterator[None]:
        """Wait likewise for parameters in a round, whose backward others may not have begun."""
        with self._waits(name):
            self.check(is_in_round=True)
            yield

    def check(self, is_in_round: bool = False) -> None:
        """Wait until the other ranks have announced as much, and compare it.

        To be called before this rank waits for collectives, which need the other ranks anyway.
        If it `is_in_round`, the latest backward is left out: ranks that still compute the forward
        need this one's part of the gathers first.

        Raises:
            UserError: the ranks' scripts do different things.
        """
        if not self._announced:
            return
        with self._lock:
            while self._announced:
                is_latest = len(self._announced) == 1
                if is_in_round and is_latest and self._announced[0].is_backward:
                    return
                wait_request(self._announced[0].request)
                announced = self._announced.popleft()
                self._compare(announced.by_rank.tolist(), announced.steps)

    def end(self) -> None:
        """Wait until all ranks' scripts have ended. Collective.

        Raises:
            UserError: another rank's script goes on with its models.
        """
        with ulfm.tolerating_loss():
            self.announce(ScriptCall.END, 0, 0)
            self.check()

    def close(self) -> None:
        """End without waiting for other ranks; MPI keeps the buffers. Not collective."""
        unregister_close(self.close)
        keep_alive(*self._announced)

    def _compare(self, by_rank: Sequence[Sequence[int]], steps: int) -> None:
        if all(announced == by_rank[0] for announced in by_rank):
            return
        first = next(rank for rank, (call, _) in enumerate(by_rank) if call != ScriptCall.END)
        if self._comm.rank != first:
            time.sleep(_SPEAKER_SEC)  # the first rank that still trains says it, and ends the job
        calls = {rank: ScriptCall(call) for rank, (call, _) in enumerate(by_rank)}
        are_of_one = len({model for call, model in by_rank if call != ScriptCall.END}) == 1
        texts = {
            rank: f"{call}" if are_of_one else f"{call} of model {by_rank[rank][1]}"
            for rank, call in calls.items()
        }
        raise UserError(
            f"--layout shard: after {steps} optimizer steps the ranks come to different calls: "
            f"{by_value(texts)}; give every rank as many micro-batches, steps and norms of "
            "gradients as the others; if the script catches an error, such as of memory, leave "
            "that batch out on every rank, or let the error end the job"
        )
