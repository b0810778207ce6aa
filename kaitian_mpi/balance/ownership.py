"""Divides a model's parameters among owners in proportion to shares, whole or by rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kaitian_mpi.balance.shares import apportion

# A parameter of more than this fraction of the smallest share is divided by rows. So the bytes that
# a rank owns miss its share by no more than that, and each bucket has something for every rank.
_LARGE = 0.01


class Part(NamedTuple):
    """Rows `begin` to `end` of a parameter, and the rank that owns them."""

    parameter: int
    """Its number among the model's parameters."""
    begin: int
    end: int
    owner: int


def divide(
    sizes: Sequence[int],
    rows: Sequence[int],
    shares: Sequence[float],
    order: Sequence[int],
    by_rows: bool = True,
) -> list[Part]:
    """Return the parts of parameters, by parameter and row; the same on every rank.

    Args:
        sizes: bytes of each parameter that count; 0 for one that has neither gradient nor state.
        rows: the length of its first dimension; 1 for one without dimensions.
        shares: each rank's share, at least 0 and not all 0.
        order: the parameters in the order of their buckets. Each bucket then has about the same
            shares, so that the ranks exchange equal amounts in each.
        by_rows: whether large parameters are divided.
    """
    total = math.fsum(shares)  # the builtin sum differs between releases of Python
    fractions = [share / total for share in shares]
    limit = _LARGE * sum(sizes) * min(fraction for fraction in fractions if fraction > 0)
    owned, done = [0.0] * len(shares), 0
    parts: list[Part] = []
    for number in order:
        size, count = sizes[number], rows[number]
        done += size
        missing = [fraction * done - own for fraction, own in zip(fractions, owned, strict=True)]
        if by_rows and size > limit and count > 1:
            counts = apportion(count, [max(0.0, each) for each in missing])
        else:
            owner = missing.index(max(missing))
            counts = [count if rank == owner else 0 for rank in range(len(shares))]
        begin = 0
        for rank, own in enumerate(counts):
            if own:
                parts.append(Part(number, begin, begin + own, rank))
                owned[rank] += size * own / count
                begin += own
    return sorted(parts)
