"""What gradients cost to sum, and how much of it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kaitian_mpi.balance.cost_model import fit

_MIB = 2**20
_FIRST_BUCKET = _MIB
BUCKET_BYTES = 25 * _MIB
_FORWARD = 1 / 3  # of a step's compute


@dataclass(frozen=True)
class AllreduceCost:
    """An allreduce of n bytes takes `latency_sec + sec_per_byte * n` seconds."""

    latency_sec: float
    """Seconds per call, whatever the size."""
    sec_per_byte: float
    """Seconds per byte of one rank's buffer."""

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of an allreduce of this many bytes."""
        return self.latency_sec + self.sec_per_byte * nbytes


@dataclass(frozen=True)
class MeasuredAllreduce:
    """What an allreduce cost among these ranks."""

    ranks_per_kind: Mapping[str, int]
    """How many ranks of each kind took part, at least 1 each."""
    cost: AllreduceCost


def fit_allreduce(sizes: Sequence[int], seconds: Sequence[float]) -> AllreduceCost:
    """Fit a line through measured (bytes, seconds) by relative least squares; no part is negative.

    Args:
        sizes: bytes, at least 1 each.
        seconds: above 0, one for each size.
    """
    line = fit(sizes, seconds)
    return AllreduceCost(line.alpha_sec, line.beta_sec)


def ddp_buckets(gradient_bytes: int) -> list[int]:
    """Return the bytes of DDP's buckets in the order reduced: 1 MiB first, then 25 MiB each.

    DDP closes a bucket at the parameter that passes the limit, so its own are a little larger.
    """
    first = min(gradient_bytes, _FIRST_BUCKET)
    full, rest = divmod(gradient_bytes - first, BUCKET_BYTES)
    return [size for size in (first, *[BUCKET_BYTES] * full, rest) if size > 0]


def exposed_seconds(
    compute_sec: float, buckets: Sequence[int], cost: AllreduceCost, micro_batches: int = 1
) -> float:
    """Return the seconds of communication that are not hidden behind backward.

    Assumes that forward is a third of computing and gradients become ready evenly over the other
    two thirds, bucket j when its cumulative part of the bytes is; that buckets are reduced one
    after the other; and that reducing takes no core from computing. Of several micro-batches only
    the last one's backward is reduced.

    Args:
        compute_sec: a rank's forward and backward.
        buckets: bytes, in the order reduced.
        cost: of one allreduce.
        micro_batches: how many the rank computes in a step.

    Returns:
        End of the last allreduce minus end of computing; the last bucket's time at least.
    """
    if not buckets:
        return 0.0
    sizes = np.array(buckets, dtype=float)
    reduce_sec = cost.latency_sec + cost.sec_per_byte * sizes
    backward_left = (1 - _FORWARD) * (1 - np.cumsum(sizes) / sizes.sum())
    before_end = compute_sec / micro_batches * backward_left
    # A queue ends when its latest busy spell does: which bucket began that one is not known.
    spells = np.cumsum(reduce_sec[::-1])[::-1] - before_end
    return float(spells.max())
