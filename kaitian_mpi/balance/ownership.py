"""Divides a model's parameters among owners in proportion to shares, whole or by rows.

A part may also have a mirror: another rank that keeps the same state, in case the owner is lost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kaitian_mpi.balance.shares import apportion

# A parameter larger than this fraction of the smallest share is divided by rows, so that a rank's
# bytes differ from its share by no more than that, and each bucket has rows for every rank.
_LARGE = 0.01
_TOGETHER = 1 / 32  # of all sharded parameters' bytes: what is gathered, or summed, together
_NEGLIGIBLE = 1e-9  # a fraction that only rounding leaves
_MANY_RANKS = 64  # above this, only a half turn of the circle is tried
NO_MIRROR = -1
# Bytes at which a shard's bucket is full: the first one, and the others. They are small because
# jobs that shard are short of memory.
BUCKET_CAPS = (1 << 20, 8 << 20)


class Need(NamedTuple):
    """The memory that a form of layout shard needs, in bytes."""

    owned: int
    """The sharded bytes of all ranks together."""
    bucket: int
    """The size at which a bucket is full."""
    buffers: int
    """Each rank's buffers while it trains."""
    small: int = 0
    """Each rank's extra bytes if values arrive while it computes."""
    freed: int = 0
    """The bytes that each rank frees by sharding its parameters; 0 if they are replicated."""
    copied: int = 0
    """What mirrors on all ranks copy of whole parameters, where a library brings the owners' new
    values: see `ShardReducer`."""


def bucket_cap(largest: int, sharded: int) -> int:
    """Return the most bytes of sharded parameters that are gathered, or summed, together.

    Each message has a fixed cost, and memory for a few of them is planned: so they grow with the
    model, up to a bucket. A parameter with more bytes has a message of its own.

    Args:
        largest: the bytes of the model's largest parameter.
        sharded: those of all its sharded parameters.
    """
    return min(BUCKET_CAPS[1], max(BUCKET_CAPS[0], largest, int(_TOGETHER * sharded)))


def cut_into_runs(keys: Sequence[int], sizes: Mapping[int, int], limit: int) -> list[list[int]]:
    """Cut a sequence into runs, of which each has at most `limit` bytes, or a single key.

    A key may occur several times; in a run its bytes count once.
    """
    runs: list[list[int]] = []
    left = 0
    for key in keys:
        is_new = not runs or key not in runs[-1]
        if not runs or (is_new and sizes[key] > left):
            runs.append([])
            left = limit
        runs[-1].append(key)
        left -= sizes[key] * is_new
    return runs


class Part(NamedTuple):
    """Rows `begin` to `end` of a parameter, and the rank that owns them."""

    parameter: int
    """Its index among the model's parameters."""
    begin: int
    end: int
    owner: int
    mirror: int = NO_MIRROR
    """The other rank that holds its state and steps it, too."""


class Pair(NamedTuple):
    """An owner and its mirror, and the fraction of the sharded bytes that both hold."""

    owner: int
    mirror: int
    fraction: float


def without_mirrors(shares: Sequence[float]) -> list[Pair]:
    """Return the owners in proportion to shares, at least 0 and not all 0."""
    total = math.fsum(shares)  # the builtin sum differs between releases of Python
    return [Pair(rank, NO_MIRROR, share / total) for rank, share in enumerate(shares)]


def with_mirrors(shares: Sequence[float], hosts: Sequence[str]) -> list[Pair]:
    """Return the owners in proportion to shares, and for each of them mirrors on other ranks.

    A rank mirrors as much as it owns, unless one owns more than half. Mirrors are on another host
    as far as that permits: all are, if no host owns more than half. The owners lie on a circle,
    host by host; the mirror of a point is the owner about half a circle further on.

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
    largest = max(owners, key=lambda owner: owner[1])
    others = [owner for owner in owners if owner != largest]
    rest = 1 - largest[1]
    if rest < 0.5 - _NEGLIGIBLE:  # it mirrors all the others, and they mirror it
        mirrors = [(rank, fraction / rest * largest[1]) for rank, fraction in others]
        mirrors.append((largest[0], rest))
        return _pairs([largest, *others], mirrors)
    largest_host = max(by_host.values())
    least = max(largest[1], min(largest_host, 1 - largest_host))
    turns = [0.5]
    if len(owners) <= _MANY_RANKS:  # another turn may give fewer pairs
        ends = itertools.accumulate(fraction for _, fraction in owners)
        turns += [end for end in ends if least - _NEGLIGIBLE < end < 1 - least + _NEGLIGIBLE]
    return min((_pairs(owners, _turned(owners, turn)) for turn in turns), key=len)


def _turned(owners: Sequence[tuple[int, float]], turn: float) -> list[tuple[int, float]]:
    """Return the owners on the circle, starting after a turn by this fraction of it."""
    before: list[tuple[int, float]] = []
    after: list[tuple[int, float]] = []
    begin = 0.0
    for rank, fraction in owners:
        skipped = min(fraction, max(0.0, turn - begin))
        before.append((rank, skipped))
        after.append((rank, fraction - skipped))
        begin += fraction
    return after + before


def _pairs(owners: Sequence[tuple[int, float]], mirrors: Sequence[tuple[int, float]]) -> list[Pair]:
    """Pair up two lists of fractions with the same sum; sorted by owner and mirror."""
    fractions: dict[tuple[int, int], float] = {}
    owners_left = list(owners)
    mirrors_left = list(mirrors)
    while owners_left and mirrors_left:
        owner, owned = owners_left.pop(0)
        mirror, mirrored = mirrors_left.pop(0)
        both = min(owned, mirrored)
        if owner != mirror and both > _NEGLIGIBLE:
            fractions[owner, mirror] = fractions.get((owner, mirror), 0.0) + both
        if owned - both > _NEGLIGIBLE:
            owners_left.insert(0, (owner, owned - both))
        if mirrored - both > _NEGLIGIBLE:
            mirrors_left.insert(0, (mirror, mirrored - both))
    return [Pair(owner, mirror, part) for (owner, mirror), part in sorted(fractions.items())]


def divide(
    sizes: Sequence[int],
    rows: Sequence[int],
    pairs: Sequence[Pair],
    order: Sequence[int],
    by_rows: bool = True,
) -> list[Part]:
    """Return the parts of parameters, sorted by parameter and row; the same on every rank.

    Args:
        sizes: sharded bytes of each parameter; 0 if it has neither gradient nor state.
        rows: the length of each parameter's first dimension; 1 if it has no dimensions.
        pairs: the owners and mirrors, sorted by owner and mirror.
        order: the parameters in the order of their buckets. Each bucket is then divided in about
            the same shares, so that the ranks exchange equal amounts in each.
        by_rows: whether large parameters are divided.
    """
    shares: dict[int, float] = {}
    for pair in pairs:
        shares[pair.owner] = shares.get(pair.owner, 0.0) + pair.fraction
    limit = _LARGE * sum(sizes) * min(share for share in shares.values() if share > 0)
    owned = [0.0] * len(pairs)
    done = 0
    parts: list[Part] = []
    for parameter in order:
        size = sizes[parameter]
        row_count = rows[parameter]
        if row_count == 0:  # an empty parameter has an owner as well
            parts.append(Part(parameter, 0, 0, pairs[0].owner, pairs[0].mirror))
            continue
        done += size
        missing = [pair.fraction * done - held for pair, held in zip(pairs, owned, strict=True)]
        if by_rows and size > limit and row_count > 1:
            pair_rows = apportion(row_count, [max(0.0, size_left) for size_left in missing])
        else:
            pair_rows = [0] * len(pairs)
            pair_rows[missing.index(max(missing))] = row_count
        begin = 0
        for index, count in enumerate(pair_rows):
            if count:
                end = begin + count
                parts.append(Part(parameter, begin, end, pairs[index].owner, pairs[index].mirror))
                owned[index] += size * count / row_count
                begin = end
    return sorted(parts)
