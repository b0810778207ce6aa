"""Divides a model's parameters among owners in proportion to shares, whole or by rows.

A part may have a mirror as well: another rank that keeps the same, in case the owner is lost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from kaitian_mpi.balance.shares import apportion

# A parameter of more than this fraction of the smallest share is divided by rows. So the bytes that
# a rank owns miss its share by no more than that, and each bucket has something for every rank.
_LARGE = 0.01
_NEGLIGIBLE = 1e-9  # of a whole: what only rounding leaves
_MANY_RANKS = 64  # for which a turn is not searched
NO_MIRROR = -1
# Bytes at which a shard's bucket is full: the first one, and the others. Small, because memory is
# short where this is used.
BUCKET_CAPS = (1 << 20, 8 << 20)


class Need(NamedTuple):
    """What a form of layout shard takes, in bytes."""

    owned: int
    """By all ranks together."""
    bucket: int
    """At which a bucket is full."""
    buffers: int
    """By each rank while it trains, besides."""
    small: int = 0
    """By each rank, if values arrive while the next step computes."""
    freed: int = 0
    """Of what each rank has at the start: of parameters, which are then in parts, too."""


def bucket_cap(largest: int) -> int:
    """Return the bytes at which a bucket is full, with parameters in parts of at most so many."""
    return min(BUCKET_CAPS[1], max(BUCKET_CAPS[0], largest))


class Part(NamedTuple):
    """Rows `begin` to `end` of a parameter, and the rank that owns them."""

    parameter: int
    """Its number among the model's parameters."""
    begin: int
    end: int
    owner: int
    mirror: int = NO_MIRROR
    """The other rank that has its state and steps it, too."""


class Pair(NamedTuple):
    """An owner and a mirror, and the fraction of everything that these two have."""

    owner: int
    mirror: int
    fraction: float


def without_mirrors(shares: Sequence[float]) -> list[Pair]:
    """Return the owners in proportion to shares, at least 0 and not all 0."""
    total = math.fsum(shares)  # the builtin sum differs between releases of Python
    return [Pair(rank, NO_MIRROR, share / total) for rank, share in enumerate(shares)]


def with_mirrors(shares: Sequence[float], hosts: Sequence[str]) -> list[Pair]:
    """Return the owners in proportion to shares, and for each of them mirrors on other ranks.

    A rank mirrors as much as it owns, unless one owns more than half. As much as that permits has
    its mirror on another host: all, if no host owns more than half. The owners lie on a circle,
    host by host; a point's mirror is what lies there after a turn by about half of it.

    Args:
        shares: each rank's share, at least 0; two or more are not 0.
        hosts: the name of each rank's host.
    """
    total = math.fsum(shares)
    by_host: dict[str, float] = {}
    for host, share in zip(hosts, shares, strict=True):
        by_host[host] = by_host.get(host, 0.0) + share / total
    places = {host: place for place, host in enumerate(by_host)}
    order = sorted(range(len(shares)), key=lambda rank: (places[hosts[rank]], rank))
    owners = [(rank, shares[rank] / total) for rank in order if shares[rank] > 0]
    largest = max(owners, key=lambda each: each[1])
    others = [each for each in owners if each != largest]
    rest = 1 - largest[1]
    if rest < 0.5 - _NEGLIGIBLE:  # it mirrors all the others, and they mirror it
        mirrors = [(rank, part / rest * largest[1]) for rank, part in others]
        return _pairs([largest, *others], [*mirrors, (largest[0], rest)])
    of_host = max(by_host.values())
    least = max(largest[1], min(of_host, 1 - of_host))
    turns = [0.5]
    if len(owners) <= _MANY_RANKS:  # others may divide it into fewer pairs
        ends = itertools.accumulate(part for _, part in owners)
        turns += [end for end in ends if least - _NEGLIGIBLE < end < 1 - least + _NEGLIGIBLE]
    return min((_pairs(owners, _turned(owners, turn)) for turn in turns), key=len)


def _turned(owners: Sequence[tuple[int, float]], turn: float) -> list[tuple[int, float]]:
    """Return what lies on the circle from a point on."""
    before: list[tuple[int, float]] = []
    after: list[tuple[int, float]] = []
    begin = 0.0
    for rank, part in owners:
        until = min(part, max(0.0, turn - begin))
        before.append((rank, until))
        after.append((rank, part - until))
        begin += part
    return after + before


def _pairs(owners: Sequence[tuple[int, float]], mirrors: Sequence[tuple[int, float]]) -> list[Pair]:
    """Return who lies beside whom on two lines of the same length, by owner and mirror."""
    found: dict[tuple[int, int], float] = {}
    left, right = [*owners], [*mirrors]
    while left and right:
        (owner, own), (mirror, other) = left.pop(0), right.pop(0)
        both = min(own, other)
        if owner != mirror and both > _NEGLIGIBLE:
            found[owner, mirror] = found.get((owner, mirror), 0.0) + both
        if own - both > _NEGLIGIBLE:
            left.insert(0, (owner, own - both))
        if other - both > _NEGLIGIBLE:
            right.insert(0, (mirror, other - both))
    return [Pair(*ranks, part) for ranks, part in sorted(found.items())]


def divide(
    sizes: Sequence[int],
    rows: Sequence[int],
    pairs: Sequence[Pair],
    order: Sequence[int],
    by_rows: bool = True,
) -> list[Part]:
    """Return the parts of parameters, by parameter and row; the same on every rank.

    Args:
        sizes: bytes of each parameter that count; 0 for one that has neither gradient nor state.
        rows: the length of its first dimension; 1 for one without dimensions.
        pairs: who owns and mirrors which fraction, by owner and mirror.
        order: the parameters in the order of their buckets. Each bucket then has about the same
            shares, so that the ranks exchange equal amounts in each.
        by_rows: whether large parameters are divided.
    """
    shares: dict[int, float] = {}
    for pair in pairs:
        shares[pair.owner] = shares.get(pair.owner, 0.0) + pair.fraction
    limit = _LARGE * sum(sizes) * min(share for share in shares.values() if share > 0)
    owned, done = [0.0] * len(pairs), 0
    parts: list[Part] = []
    for number in order:
        size, count = sizes[number], rows[number]
        if count == 0:  # it has nothing to own, but an owner
            parts.append(Part(number, 0, 0, pairs[0].owner, pairs[0].mirror))
            continue
        done += size
        missing = [pair.fraction * done - own for pair, own in zip(pairs, owned, strict=True)]
        if by_rows and size > limit and count > 1:
            counts = apportion(count, [max(0.0, each) for each in missing])
        else:
            chosen = missing.index(max(missing))
            counts = [count if index == chosen else 0 for index in range(len(pairs))]
        begin = 0
        for index, own in enumerate(counts):
            if own:
                end = begin + own
                parts.append(Part(number, begin, end, pairs[index].owner, pairs[index].mirror))
                owned[index] += size * own / count
                begin = end
    return sorted(parts)
