"""Small values between ranks, as JSON: nothing that arrives is ever unpickled."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI


def gather_values(comm: MPI.Comm, value: Any) -> list[Any]:
    """Return every rank's value (anything JSON can hold), by rank. Collective."""
    from mpi4py import MPI

    own = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
    lengths = np.empty(comm.size, dtype=np.int64)
    comm.Allgather(np.array([own.size], dtype=np.int64), lengths)
    gathered = np.empty(int(lengths.sum()), dtype=np.uint8)
    comm.Allgatherv((own, MPI.BYTE), (gathered, lengths.tolist(), MPI.BYTE))
    ends = np.cumsum(lengths)
    return [
        json.loads(gathered[end - length : end].tobytes())
        for end, length in zip(ends, lengths, strict=True)
    ]
