"""Counter-based random numbers: a function of seed, epoch and sample index, without state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def random_bits(seed: int, epoch: int, indices: Sequence[int]) -> NDArray[np.uint64]:
    """Return 64 random bits for each sample index, independent of the other indices.

    This is splitmix64 (Steele, Lea and Flood, 2014, "Fast splittable pseudorandom number
    generators") at the counters `indices`, keyed by (seed, epoch).

    Args:
        seed: any integer; only its low 64 bits are used.
        epoch: at least 0.
        indices: n integers, each at least 0.

    Returns:
        uint64 [n].
    """
    key = _mix(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64))
    key = _mix(key + np.array([epoch], dtype=np.uint64))
    return _mix(key + np.asarray(indices, dtype=np.uint64))


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # uint64 arithmetic wraps without a warning on arrays; on numpy scalars it would warn.
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
