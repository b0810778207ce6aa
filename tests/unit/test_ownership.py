"""Who owns which rows of which parameters; and how emulated memory is given."""

from itertools import pairwise

import pytest

from kaitian_mpi.balance.ownership import divide
from kaitian_mpi.devices.memory_limit import parse_memory
from kaitian_mpi.errors import UserError


@pytest.mark.parametrize("shares", [[1], [3, 1], [600, 300, 300], [0, 2, 1], [5, 1, 1, 1]])
@pytest.mark.parametrize("by_rows", [True, False])
def test_parts_cover_each_parameter_once_and_follow_the_shares(shares, by_rows):
    rows = [40, 1000, 1, 64, 64, 7] * 20
    sizes = [40 * 8, 1000 * 16, 4, 64 * 64, 64 * 64, 0] * 20
    parts = divide(sizes, rows, shares, [*reversed(range(len(rows)))], by_rows)
    owned = [0.0] * len(shares)
    for number, count in enumerate(rows):
        own = [part for part in parts if part.parameter == number]
        assert own[0].begin == 0
        assert own[-1].end == count
        assert all(a.end == b.begin for a, b in pairwise(own))
        assert len(own) == 1 or by_rows
        for part in own:
            owned[part.owner] += sizes[number] * (part.end - part.begin) / count
    expected = [share / sum(shares) for share in shares]
    margin = 0.02 if by_rows else 0.2
    assert [each / sum(sizes) for each in owned] == pytest.approx(expected, rel=margin)


def test_emulated_memory_is_parsed():
    assert parse_memory("", 2) == [0, 0]
    assert parse_memory("1:600MB, 2:1.5GB", 3) == [0, 600_000_000, 1_500_000_000]


@pytest.mark.parametrize("text", ["1", "3:600MB", "1:600", "1:0MB", "x:1MB", "1:-1GB"])
def test_malformed_emulated_memory_is_refused(text):
    with pytest.raises(UserError, match="write rank:size"):
        parse_memory(text, 3)
