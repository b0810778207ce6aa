"""Apportionment of samples in integer shares."""

from __future__ import annotations

import math
import random

import pytest

from kaitian_mpi.balance.shares import apportion, merge_small, split_micro_batches


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [
        (10, [1], [10]),
        (0, [1, 2], [0, 0]),
        (10, [1, 1], [5, 5]),
        (10, [1, 1, 1], [4, 3, 3]),  # ties go to the lower index
        (11, [1, 1, 1], [4, 4, 3]),
        (1, [0, 0, 3], [0, 0, 1]),
        (5, [0, 1, 0, 1], [0, 3, 0, 2]),
        (256, [1.0, 0.5, 0.25, 0.25], [128, 64, 32, 32]),
        (7, [0.1, 0.2, 0.7], [1, 1, 5]),
    ],
)
def test_apportion(total: int, weights: list[float], shares: list[int]) -> None:
    assert apportion(total, weights) == shares


def test_shares_sum_to_the_total_and_stay_within_one_of_the_quota() -> None:
    draw = random.Random(0)
    for _ in range(500):
        weights = [draw.choice([0, draw.random(), 1e6 * draw.random()]) for _ in range(8)] + [0.5]
        total = draw.randrange(10_000)
        shares = apportion(total, weights)
        assert sum(shares) == total
        for share, weight in zip(shares, weights, strict=True):
            assert abs(share - total * weight / math.fsum(weights)) < 1 + 1e-6
            assert weight > 0 or share == 0


def test_micro_batches_are_equal_to_within_one_and_no_larger_than_allowed():
    assert split_micro_batches(10, None) == [10]
    assert split_micro_batches(0, 4) == [0]
    assert split_micro_batches(10, 4) == [4, 3, 3]
    for samples in range(1, 50):
        for most in range(1, 12):
            parts = split_micro_batches(samples, most)
            assert sum(parts) == samples
            assert max(parts) <= most
            assert max(parts) - min(parts) <= 1
            assert len(parts) == -(-samples // most)


def test_a_micro_batch_is_never_too_small_where_the_share_is_not():
    assert split_micro_batches(5, 2, 2) == [3, 2]
    assert split_micro_batches(3, 2, 2) == [3]
    assert split_micro_batches(1, 2, 2) == [1]
    assert split_micro_batches(0, 2, 2) == [0]
    for samples in range(2, 50):
        for most in range(2, 12):
            parts = split_micro_batches(samples, most, 2)
            assert sum(parts) == samples
            assert 2 <= min(parts) <= max(parts) <= max(most, 3)
            if most > 2:
                assert parts == split_micro_batches(samples, most)


@pytest.mark.parametrize(
    ("shares", "planned", "min_batch", "merged"),
    [
        ([4, 4, 1, 1], [96, 96, 32, 32], 2, [4, 4, 2, 0]),
        ([4, 4, 1, 1, 1], [9, 9, 3, 3, 4], 2, [5, 4, 0, 0, 2]),
        ([1, 1, 1], [2, 2, 2], 2, [3, 0, 0]),
        ([1, 0, 1], [2, 5, 4], 2, [0, 0, 2]),
        ([0, 1], [2, 2], 2, [0, 1]),  # nothing can be done
        ([2, 2, 3], [3, 3, 3], 3, [4, 0, 3]),
        ([5, 0, 2], [5, 0, 2], 2, [5, 0, 2]),
    ],
)
def test_shares_that_are_too_small_are_merged(shares, planned, min_batch, merged):
    assert merge_small(shares, planned, min_batch) == merged
