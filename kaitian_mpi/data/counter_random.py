"""Random numbers that are a function of their place: no state, no order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def random_words(seed: int, epoch: int, indices: Sequence[int]) -> NDArray[np.uint64]:
    """Return 64 random bits for each sample index, the same whatever else is asked for.

    This is splitmix64 (Steele, Lea and Flood, 2014, "Fast splittable pseudorandom number
    generators") at the counters `indices`, keyed by (seed, epoch).

    Args:
        seed: any whole number; its low 64 bits count.
        epoch: at least 0.
        indices: n numbers of at least 0.

    Returns:
        uint64 [n].
    """
    key = _mix(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64))
    key = _mix(key + np.array([epoch], dtype=np.uint64))
    return _mix(key + np.asarray(indices, dtype=np.uint64))


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # On arrays uint64 arithmetic wraps in silence, on numpy scalars it would warn.
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
