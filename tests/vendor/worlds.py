"""The worlds in which a test runs, and which of them `bin/test` leaves to `bin/test --all`.

A world is named by its ranks' devices, and by the library that connects those of one kind. Each
library serves a group of all ranks, and groups beside others.
"""

from __future__ import annotations

import pytest
from choices import by_default
from mpi_session import LAUNCH

# By the number of ranks.
_OF_SEVERAL_KINDS = {
    2: "vendor,cpu-nccl",
    3: "vendor,cpu,vendor-xccl",
    4: "vendor,cpu,vendor,vendor2-hccl",
}
_OF_ONE_KIND = {1: "vendor-nccl", 2: "auto-mccl", 3: "vendor,vendor,vendor-hccl"}
_FURTHER = {
    2: ["vendor,vendor-xccl"],
    4: ["vendor,vendor2,vendor2,vendor-mccl", "vendor,vendor,vendor,vendor-nccl"],
}

_SIZE = LAUNCH.world_size
_BY_DEFAULT = [worlds[_SIZE] for worlds in (_OF_SEVERAL_KINDS, _OF_ONE_KIND) if _SIZE in worlds]
_ALL = [*_BY_DEFAULT, *_FURTHER.get(_SIZE, [])]

WORLDS = by_default(_ALL, _BY_DEFAULT)


def _mostly_in(worlds: dict[int, str]) -> pytest.MarkDecorator:
    chosen = worlds.get(_SIZE, _BY_DEFAULT[0])
    return pytest.mark.parametrize("world", by_default(_ALL, [chosen]), indirect=True)


mostly_in_several_kinds = _mostly_in(_OF_SEVERAL_KINDS)
"""Marks a test `thorough` where all ranks are of one kind."""

mostly_in_one_kind = _mostly_in(_OF_ONE_KIND)
"""Marks a test `thorough` where ranks are of several kinds, if there is another world."""
