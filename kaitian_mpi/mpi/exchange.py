"""Small values between ranks, as JSON: nothing that arrives is ever unpickled."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kaitian_mpi.errors import CollectiveError

if TYPE_CHECKING:
    from mpi4py import MPI

_MOST_BYTES = 1 << 30  # in one call of MPI, which counts in 31 bits


def gather_values(comm: MPI.Comm, value: Any) -> list[Any]:
    """Return every rank's value (anything JSON can hold), by rank. Collective."""
    from mpi4py import MPI

    own = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
    # When a rank dies, MPI may leave a part unfilled and tell of it only in the next call.
    lengths = np.full(comm.size, -1, dtype=np.int64)
    comm.Allgather(np.array([own.size], dtype=np.int64), lengths)
    if lengths.min() < 0:
        raise CollectiveError("a rank's values have not come")
    gathered = np.zeros(int(lengths.sum()), dtype=np.uint8)
    comm.Allgatherv((own, MPI.BYTE), (gathered, lengths.tolist(), MPI.BYTE))
    return [json.loads(part) for part in _parts(gathered, lengths.tolist())]


def broadcast_bytes(comm: MPI.Comm, content: bytes | None, root: int) -> bytes:
    """Return the content that rank `root` gives, on every rank. Collective."""
    from mpi4py import MPI

    length = np.array([len(content or b"")], dtype=np.int64)
    comm.Bcast(length, root)
    buffer = np.empty(int(length[0]), dtype=np.uint8)
    if content is not None:
        buffer[:] = np.frombuffer(content, dtype=np.uint8)
    for begin in range(0, buffer.size, _MOST_BYTES):
        comm.Bcast((buffer[begin : begin + _MOST_BYTES], MPI.BYTE), root)
    return buffer.tobytes()


def gather_bytes(comm: MPI.Comm, content: bytes, root: int) -> list[bytes]:
    """Return every rank's content on rank `root`, by rank; elsewhere nothing. Collective."""
    from mpi4py import MPI

    lengths = gather_values(comm, len(content))
    own = np.frombuffer(content, dtype=np.uint8)
    if comm.rank != root:
        comm.Gatherv((own, MPI.BYTE), None, root)
        return []
    gathered = np.empty(sum(lengths), dtype=np.uint8)
    comm.Gatherv((own, MPI.BYTE), (gathered, lengths, MPI.BYTE), root)
    return _parts(gathered, lengths)


def _parts(gathered: np.ndarray, lengths: Sequence[int]) -> list[bytes]:
    """Cut what has been gathered into the ranks' parts."""
    ends = itertools.accumulate(lengths)
    return [
        gathered[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)
    ]
