"""Which rank owns which rows of a parameter, and emulated memory."""

import sys
from itertools import pairwise

import pytest
from jobs import PYTHON, run_alone

from kaitian_mpi.balance.ownership import (
    bucket_cap,
    cut_into_runs,
    divide,
    with_mirrors,
    without_mirrors,
)
from kaitian_mpi.devices.memory_limit import parse_memory
from kaitian_mpi.errors import UserError


@pytest.mark.parametrize("shares", [[1], [3, 1], [600, 300, 300], [0, 2, 1], [5, 1, 1, 1]])
@pytest.mark.parametrize("by_rows", [True, False])
def test_parts_cover_each_parameter_once_and_follow_the_shares(shares, by_rows):
    rows = [40, 1000, 1, 64, 64, 7, 0] * 20
    sizes = [40 * 8, 1000 * 16, 4, 64 * 64, 64 * 64, 0, 0] * 20
    parts = divide(sizes, rows, without_mirrors(shares), [*reversed(range(len(rows)))], by_rows)
    owned = [0.0] * len(shares)
    for number, count in enumerate(rows):
        row_parts = [part for part in parts if part.parameter == number]
        assert row_parts[0].begin == 0
        assert row_parts[-1].end == count
        assert all(part.end == following.begin for part, following in pairwise(row_parts))
        assert len(row_parts) == 1 or by_rows
        for part in row_parts:
            owned[part.owner] += sizes[number] * (part.end - part.begin) / max(1, count)
    expected = [share / sum(shares) for share in shares]
    margin = 0.02 if by_rows else 0.2
    assert [size / sum(sizes) for size in owned] == pytest.approx(expected, rel=margin)


@pytest.mark.parametrize(
    ("shares", "hosts", "pairs", "on_other_hosts"),
    [
        ([1, 1], "aa", 2, 0.0),
        ([3, 1], "ab", 2, 1.0),
        ([1, 1, 1], "aaa", 3, 0.0),
        ([600, 300, 300], "aaa", 4, 0.0),
        ([600, 300, 300], "abb", 4, 1.0),
        ([5, 1, 1, 1], "abbb", 6, 1.0),
        ([1, 1, 1, 1], "abab", 4, 1.0),
        ([1, 1, 1, 1], "aaab", None, 0.5),
        ([1, 2, 3, 4, 5, 6], "aabbcc", None, 0.95),
        ([0, 2, 1, 1], "abab", None, 0.5),
    ],
)
def test_a_rank_mirrors_as_much_as_it_owns_and_for_other_hosts_if_possible(
    shares, hosts, pairs, on_other_hosts
):
    owner_pairs = with_mirrors(shares, hosts)
    fractions = [share / sum(shares) for share in shares]
    largest = max(fractions)
    owned = [0.0] * len(shares)
    mirrored = [0.0] * len(shares)
    mirrored_elsewhere = 0.0  # on another host
    for owner, mirror, fraction in owner_pairs:
        assert owner != mirror
        owned[owner] += fraction
        mirrored[mirror] += fraction
        if hosts[owner] != hosts[mirror]:
            mirrored_elsewhere += fraction
    assert owned == pytest.approx(fractions)
    if largest <= 0.5:
        assert mirrored == pytest.approx(fractions)
    else:
        totals = [sum(both) for both in zip(owned, mirrored, strict=True)]
        expected = [1 if f == largest else f / (1 - largest) for f in fractions]
        assert totals == pytest.approx(expected)
    assert mirrored_elsewhere >= on_other_hosts - 1e-6
    assert len(owner_pairs) == pairs or pairs is None
    parts = divide([8000, 80, 0] * 9, [1000, 10, 3] * 9, owner_pairs, range(27))
    rank_rows = [0] * len(shares)
    for part in parts:
        if part.parameter % 3 < 2:  # the others have no bytes
            rank_rows[part.owner] += part.end - part.begin
    assert [rows / sum(rank_rows) for rows in rank_rows] == pytest.approx(fractions, abs=0.01)
    assert all(part.mirror not in (part.owner, -1) for part in parts)


def test_emulated_memory_is_parsed():
    assert parse_memory("", 2) == [0, 0]
    assert parse_memory("1:600MB, 2:1.5GB", 3) == [0, 600_000_000, 1_500_000_000]


MB = 1 << 20


@pytest.mark.parametrize(
    ("largest", "sharded", "cap"),
    [(1, 2, MB), (2 * MB, 16 * MB, 2 * MB), (MB, 128 * MB, 4 * MB), (64 * MB, 999 * MB, 8 * MB)],
)
def test_what_is_gathered_together_grows_with_the_model_up_to_a_bucket(largest, sharded, cap):
    assert bucket_cap(largest, sharded) == cap


@pytest.mark.parametrize(
    ("keys", "limit", "runs"),
    [
        ([], 4, []),
        ([1, 2, 3, 4], 4, [[1, 2], [3], [4]]),
        ([4, 1, 2, 3, 3, 1, 4], 5, [[4, 1], [2, 3, 3], [1, 4]]),
        ([1, 2, 1, 2, 1], 3, [[1, 2, 1, 2, 1]]),
        ([9, 9, 1], 4, [[9, 9], [1]]),
    ],
)
def test_runs_have_at_most_as_many_bytes_or_one_key_whose_bytes_count_once(keys, limit, runs):
    sizes = {1: 1, 2: 2, 3: 3, 4: 4, 9: 9}
    assert cut_into_runs(keys, sizes, limit) == runs


@pytest.mark.parametrize("text", ["1", "3:600MB", "1:600", "1:0MB", "x:1MB", "1:-1GB"])
def test_malformed_emulated_memory_is_refused(text):
    with pytest.raises(UserError, match="write rank:size"):
        parse_memory(text, 3)


_FREES = """
import threading
import torch
from kaitian_mpi.devices.cpu import CpuDevice
from kaitian_mpi.devices.memory_limit import LimitedDevice, _allocated
device = CpuDevice()
device.select(0)
LimitedDevice(device, 300_000_000)
selecting = threading.Thread(target=device.select, args=(0,))
selecting.start()
selecting.join()
tensors = [torch.ones(1 << 20) for _ in range(20)]
before = _allocated()
del tensors[::2]
print(before - _allocated())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_freed_blocks_leave_no_gaps_in_limited_memory_though_threads_select_the_cpu(tmp_path):
    """As those of collectives do."""
    (tmp_path / "frees.py").write_text(_FREES)
    freed = int(run_alone(PYTHON, str(tmp_path / "frees.py"), cwd=tmp_path).out)
    assert freed == pytest.approx(10 * (4 << 20), rel=0.05)
