"""How a plan divides a loader's batches, and what a loader that does not train yields."""

import copy
import gc
import itertools
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from kaitian_mpi.integrations.adaptive_plan import AdaptivePlan
from kaitian_mpi.integrations.planned_loaders import plan_loaders

accelerate = pytest.importorskip("accelerate.data_loader")
RANKS, ROWS = 3, 2


class Planner:
    """Has the plan of one rank's loader."""

    size = RANKS

    def __init__(self, rank: int, shares: list[int]) -> None:
        self.rank = rank
        self.plan = AdaptivePlan(ROWS, [None] * RANKS)
        self.plan.shares = shares
        self.in_training = False
        self.changes: dict[int, list[int]] = {}  # by the number of batches given before
        self._given = itertools.count()

    def plan_of(self, sampler):
        return self.plan

    def is_training(self):
        return self.in_training

    def has_new_plan(self):
        new = self.changes.get(next(self._given))
        self.plan.shares = new or self.plan.shares
        return new is not None

    def batch_taken(self, iteration, rows, batch):
        pass

    def unplanned_loader_iterated(self, is_stream):
        pass


def distributed(data, rank, drop_last, **options):
    sampler = DistributedSampler(data, RANKS, rank, seed=1, drop_last=drop_last)
    return DataLoader(data, ROWS, sampler=sampler, drop_last=drop_last, **options)


def prepared(data, rank, drop_last, **options):
    generator = torch.Generator().manual_seed(1)
    batches = BatchSampler(RandomSampler(data, generator=generator), ROWS, drop_last)
    batches_of_rank = accelerate.BatchSamplerShard(batches, RANKS, rank)
    return DataLoader(data, batch_sampler=batches_of_rank, **options)


def epoch(
    make, length, drop_last, shares, trains=True, changes=None, skipped=0, workers=0, mode=False
):
    """Return each rank's batches of an epoch."""
    found = []
    for rank in range(RANKS):
        plan = Planner(rank, shares or [ROWS] * RANKS)
        plan.changes, plan.in_training = changes or {}, mode
        restore = plan_loaders(plan) if shares else lambda: None
        try:
            loader = make(list(range(length)), rank, drop_last, num_workers=workers)
            if skipped:
                batches_left = accelerate.SkipBatchSampler(loader.batch_sampler, skipped)
                loader = DataLoader(loader.dataset, batch_sampler=batches_left, num_workers=workers)
            if shares:
                loader.batch_sampler.trains = trains
            found.append([batch.tolist() for batch in loader])
            assert len(loader) == len(found[-1])
        finally:
            restore()
    return found


def rows_of(ranks):
    """Return the rows of an epoch."""
    return sorted(row for batches in ranks for batch in batches for row in batch)


@pytest.mark.parametrize("make", [distributed, prepared])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [4, 12, 13, 17])
def test_a_loader_that_does_not_train_keeps_its_batches(make, length, drop_last):
    plain = epoch(make, length, drop_last, None)
    assert epoch(make, length, drop_last, [1, 1, 4], trains=False) == plain


@pytest.mark.parametrize("make", [distributed, prepared])
@pytest.mark.parametrize("shares", [[2, 2, 2], [1, 1, 4], [3, 2, 1]])
@pytest.mark.parametrize("length", [4, 6, 12, 13, 15, 17])
def test_an_epoch_has_each_row_once_in_as_many_steps(make, shares, length):
    plain, cut = (epoch(make, length, False, split) for split in (None, shares))
    assert [len(batches) for batches in cut] == [len(batches) for batches in plain]
    steps = [[row for part in step for row in part] for step in zip(*cut, strict=True)]
    full = length // 6
    assert [[len(part) for part in step] for step in zip(*cut, strict=True)][:full] == [
        shares
    ] * full
    if length % 6 != 1:  # else two ranks have a row again, which counts nothing
        assert sorted(row for step in steps for row in step) == list(range(length))
    # A full step has the rows that the ranks' own batches would have had together.
    for step, plain_batches in zip(steps[:full], zip(*plain, strict=True), strict=False):
        assert sorted(step) == sorted(row for part in plain_batches for row in part)


@pytest.mark.parametrize("make", [distributed, prepared])
@pytest.mark.parametrize("length", [3, 11, 12])
def test_a_partial_batch_may_be_the_first_of_a_training(make, length):
    """As after a resume: nobody has trained on the loader's batches yet."""
    cut = epoch(make, length, False, [2, 2, 2], trains=False, mode=True)
    assert sorted(row for rank in cut for part in rank for row in part) == list(range(length))


@pytest.mark.parametrize("shares", [[2, 2, 2], [1, 1, 4]])
def test_a_sampler_that_drops_the_rest_drops_it(shares):
    def sampled(data, rank, drop_last, **options):
        sampler = DistributedSampler(data, RANKS, rank, seed=1, drop_last=True)
        return DataLoader(data, ROWS, sampler=sampler, **options)

    plain, cut = (epoch(sampled, 17, False, split) for split in (None, shares))
    assert rows_of(cut) == rows_of(plain)
    assert len(rows_of(cut)) == 15


@pytest.mark.parametrize("workers", [0, 2])
def test_a_new_plan_holds_from_the_next_batch_on(workers):
    changes = {2: [4, 1, 1], 3: [1, 1, 4]}
    cut = epoch(distributed, 30, False, [2, 2, 2], changes=changes, workers=workers)
    sizes = [[len(part) for part in step] for step in zip(*cut, strict=True)]
    assert sizes == [[2, 2, 2], [2, 2, 2], [4, 1, 1], [1, 1, 4], [1, 1, 4]]
    assert sorted(row for rank in cut for part in rank for row in part) == list(range(30))
    whole, rest = (epoch(prepared, 20, False, [1, 1, 4], skipped=count) for count in (0, 2))
    assert rest == [rank[2:] for rank in whole]  # after the batches that were trained


class Processes(list):
    """Gives the identity of the process that loads a row."""

    def __getitem__(self, row):
        return os.getpid()


def test_a_new_plan_keeps_the_workers():
    planner = Planner(0, [2, 2, 2])
    planner.changes = {2: [4, 1, 1], 3: [1, 1, 4]}
    restore = plan_loaders(planner)
    try:
        loader = distributed(Processes(range(30)), 0, False, num_workers=1)
        loader.batch_sampler.trains = True
        state = torch.get_rng_state()
        batches = list(loader)
    finally:
        restore()
    assert [len(batch) for batch in batches] == [2, 2, 4, 1, 1]
    assert len({process for batch in batches for process in batch.tolist()} - {os.getpid()}) == 1
    torch.empty((), dtype=torch.int64).random_()  # one seed for the epoch's workers
    drawn = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.empty((), dtype=torch.int64).random_()
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), drawn)


class Stream(IterableDataset):
    """Yields the process that reads a row."""

    def __iter__(self):
        return itertools.repeat(os.getpid(), 6)


def test_persistent_workers_of_a_stream_end_with_its_loader():
    """Not when garbage is collected, for which torch waits for each of them."""
    restore = plan_loaders(Planner(0, [2, 2, 2]))
    gc.collect()
    gc.disable()
    try:
        loader = DataLoader(Stream(), 2, num_workers=1, persistent_workers=True)
        readers = [batch.tolist() for _ in range(2) for batch in loader]
        assert readers == 6 * [2 * [readers[0][0]]]
        train_sampler = loader.batch_sampler
        del loader
        assert not train_sampler.trains
        assert not Path(f"/proc/{readers[0][0]}").exists()
    finally:
        gc.enable()
        restore()


def test_copies_and_older_iterators_do_no_harm():
    planner = Planner(0, [1, 1, 4])
    restore = plan_loaders(planner)
    try:
        loader = distributed(list(range(24)), 0, False)
        cut = loader.batch_sampler
        cut.trains = True
        older = iter(loader)
        first = next(older).tolist()
        newer = iter(loader)
        assert next(newer).tolist() == first
        older.close()
        assert [len(batch) for batch in newer] == [1, 1, 1]
        assert len(copy.deepcopy(cut)) == len(pickle.loads(pickle.dumps(cut.sampler))) // 2
    finally:
        restore()


def test_a_partial_batch_is_divided_in_proportion():
    for shares, min_batch, rows, expected in (
        *(([30, 2], 1, 32, [30, 2]), ([30, 2], 1, 6, [5, 1]), ([30, 2], 2, 6, [4, 2])),
        *(([30, 2], 2, 3, [2, 1]), ([30, 2], 1, 1, [1, 0]), ([1, 1], 1, 2, [1, 1])),
        ([3, 3, 2], 1, 4, [2, 1, 1]),
    ):
        plan = AdaptivePlan(sum(shares) // len(shares), [None] * len(shares), min_batch)
        plan.shares = shares
        assert plan.divide(rows) == expected
