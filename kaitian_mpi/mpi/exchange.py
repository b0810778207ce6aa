"""Exchanges small values between ranks as JSON, so that nothing received is unpickled."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kaitian_mpi.errors import AgreedError, CollectiveError, UserError
from kaitian_mpi.preflight.verdict import by_value, differ, ranks_by, ranks_text
from kaitian_mpi.runtime.polling import sleeping_barrier, wait_request

if TYPE_CHECKING:
    from mpi4py import MPI

Key = TypeVar("Key", bound=Hashable)

SAME_SETTINGS = "give every rank the same settings; each host reads its own --config file"
"""The advice for settings that differ between ranks."""
_LOST = "a rank was lost during the exchange"


def gather_values(comm: MPI.Comm, value: Any) -> list[Any]:
    """Gather a value (anything JSON can hold) from every rank, in rank order. Collective."""
    content = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
    # When a rank dies, MPI may leave its part unfilled and report it only in the next call.
    lengths = np.full(comm.size, -1, dtype=np.int64)
    # Ranks may come minutes apart, as after loading their data.
    wait_request(comm.Iallgather(np.array([content.size], dtype=np.int64), lengths))
    if lengths.min() < 0:
        raise CollectiveError(_LOST)
    gathered = np.zeros(lengths.sum(), dtype=np.uint8)
    wait_request(comm.Iallgatherv(content, (gathered, lengths.tolist())))
    try:
        return [json.loads(part) for part in _parts(gathered, lengths.tolist())]
    except ValueError as error:
        raise CollectiveError(_LOST) from error


def gather_bytes(comm: MPI.Comm, content: bytes) -> list[bytes]:
    """Gather every rank's content on rank 0, in rank order; [] elsewhere. Collective."""
    lengths = gather_values(comm, len(content))
    sent = np.frombuffer(content, dtype=np.uint8)
    if comm.rank != 0:
        comm.Gatherv(sent, None)
        return []
    gathered = np.empty(sum(lengths), dtype=np.uint8)
    comm.Gatherv(sent, (gathered, lengths))
    return _parts(gathered, lengths)


def time_in_rounds(
    comm: MPI.Comm, works: Mapping[Key, Callable[[], None]], rounds: int, max_sec: float
) -> dict[Key, float]:
    """Return the slowest rank's median seconds for each work, by its key. Collective.

    All come in each round, so that a temporary load affects all of them. The first round warms up;
    it counts if no other follows, as none does after `max_sec`.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in works}
    began = time.perf_counter()
    for _ in range(rounds):
        for key, work in works.items():
            sleeping_barrier(comm)
            start = time.perf_counter()
            work()
            seconds[key].append(time.perf_counter() - start)
        # The same decision on every rank; otherwise some would wait for others in another round.
        if max(gather_values(comm, time.perf_counter() - began)) > max_sec:
            break
    medians = [statistics.median(times[1:] or times) for times in seconds.values()]
    slowest = [max(by_rank) for by_rank in zip(*gather_values(comm, medians), strict=True)]
    return dict(zip(works, slowest, strict=True))


def _parts(gathered: np.ndarray, lengths: Sequence[int]) -> list[bytes]:
    ends = itertools.accumulate(lengths)
    return [
        gathered[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)
    ]


@contextmanager
def agree_on_errors(comm: MPI.Comm) -> Iterator[None]:
    """Raise any rank's `UserError` from the block as the same `AgreedError` on every rank.

    Its exit code is the highest of the ranks' errors. Collective: every rank must enter and leave.
    Nothing inside the block may be collective, since a rank with an error leaves it early, unless
    it comes before anything that can raise on one rank alone.
    """
    fault, code = "", 0
    try:
        yield
    except UserError as error:
        fault = str(error)
        code = error.exit_code
    gathered = gather_values(comm, (fault, code))
    faults = [text for text, _ in gathered]
    if any(faults):
        raise AgreedError(join_errors(faults), max(code for _, code in gathered))


def join_errors(faults: list[str]) -> str:
    """Join the error messages of all ranks ("" for none), in rank order, into one line."""
    if len(set(faults)) == 1:
        return faults[0]
    at = ranks_by(dict(enumerate(faults)))
    return "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in at.items() if text)


def check_same(comm: MPI.Comm, values: Mapping[str, str], advice: str) -> None:
    """Raise the same `AgreedError` everywhere if a value differs between ranks. Collective."""
    by_rank = gather_values(comm, dict(values))
    faults = []
    for name in dict.fromkeys(name for settings in by_rank for name in settings):
        held = {rank: settings[name] for rank, settings in enumerate(by_rank) if name in settings}
        if differ(held):
            faults.append(f"{name} differs between ranks: {by_value(held)}")
    if faults:
        raise AgreedError(f"{'; '.join(faults)}; {advice}")
