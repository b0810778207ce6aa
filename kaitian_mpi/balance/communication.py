"""The cost of summing gradients, and the part of it not hidden behind backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kaitian_mpi.balance.cost_model import fit

_MIB = 2**20
_FIRST_BUCKET = _MIB
BUCKET_BYTES = 25 * _MIB
_FORWARD = 1 / 3  # part of a step's compute time


@dataclass(frozen=True)
class AllreduceCost:
    """An allreduce of n bytes takes `latency_sec + sec_per_byte * n` seconds."""

    latency_sec: float
    """Seconds per call, independent of the size."""
    sec_per_byte: float
    """Seconds per byte of one rank's buffer."""

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of an allreduce of this many bytes."""
        return self.latency_sec + self.sec_per_byte * nbytes


@dataclass(frozen=True)
class MeasuredAllreduce:
    """The measured cost of an allreduce among some ranks."""

    ranks_per_kind: Mapping[str, int]
    """The number of ranks of each kind that took part, at least 1 each."""
    cost: AllreduceCost


def fit_allreduce(sizes: Sequence[int], seconds: Sequence[float]) -> AllreduceCost:
    """Fit a line to measured (bytes, seconds) by relative least squares; neither part is negative.

    Args:
        sizes: bytes, at least 1 each.
        seconds: above 0, one for each size.
    """
    line = fit(sizes, seconds)
    return AllreduceCost(line.alpha_sec, line.beta_sec)


def ddp_buckets(gradient_bytes: int) -> list[int]:
    """Return the bytes of DDP's buckets in the order reduced: 1 MiB first, then 25 MiB each.

    DDP closes a bucket at the parameter that exceeds the limit, so real buckets are a bit larger.
    """
    first = min(gradient_bytes, _FIRST_BUCKET)
    full, remainder = divmod(gradient_bytes - first, BUCKET_BYTES)
    return [size for size in (first, *[BUCKET_BYTES] * full, remainder) if size > 0]


def exposed_seconds(
    compute_sec: float, buckets: Sequence[int], cost: AllreduceCost, micro_batches: int = 1
) -> float:
    """Return the seconds of communication that are not hidden behind backward.

    Assumes that forward takes a third of the compute time and that gradients become ready evenly
    over the other two thirds, each bucket at its cumulative part of the bytes; that buckets are
    reduced one after the other; and that communication takes no core from computing. With several
    micro-batches, only the last backward overlaps with communication.

    Args:
        compute_sec: seconds of a rank's forward and backward.
        buckets: bytes, in the order reduced.
        cost: of one allreduce.
        micro_batches: the number that the rank computes per step.

    Returns:
        The time from the end of computing to the end of the last allreduce, in seconds; at least
        the last bucket's time.
    """
    if not buckets:
        return 0.0
    sizes = np.array(buckets, dtype=float)
    reduce_sec = cost.latency_sec + cost.sec_per_byte * sizes
    backward_left = (1 - _FORWARD) * (1 - np.cumsum(sizes) / sizes.sum())
    before_end = compute_sec / micro_batches * backward_left
    # The queue ends with its last busy period. Any bucket may start that, so take the maximum.
    exposed = np.cumsum(reduce_sec[::-1])[::-1] - before_end
    return float(exposed.max())
