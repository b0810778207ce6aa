"""make_loader and evaluation_indices."""

from __future__ import annotations

import random

import pytest
import torch

from kaitian_mpi.data import LoadAdaptiveSampler, evaluation_indices, make_loader
from kaitian_mpi.data.arrays import ImageArrays
from kaitian_mpi.data.augment import Augmented


def make_data() -> Augmented:
    images = torch.randint(0, 256, (23, 3, 32, 32), dtype=torch.uint8)
    arrays = ImageArrays(images, torch.arange(23), (0.5,) * 3, (0.25,) * 3)
    return Augmented(arrays, "crop-flip", seed=0)


# A worker takes seconds to import torch, so one test does all that needs one.
@pytest.mark.parametrize("workers", [0, 1])
def test_each_list_is_a_batch(workers: int) -> None:
    data = make_data()
    sampler = LoadAdaptiveSampler(data, [1, 9], 0)
    data.set_epoch(2)
    sampler.set_epoch(2)
    loader = make_loader(data, sampler, workers, pin_memory=False)
    assert len(loader) == 3
    batches = list(loader)
    assert [len(labels) for _, labels in batches] == [1, 1, 0]
    for inputs, labels in batches:
        expected, _ = data[labels.tolist()]
        assert torch.equal(inputs, expected)


def test_workers_are_not_forked() -> None:
    data = make_data()
    loader = make_loader(data, LoadAdaptiveSampler(data, [4], 0), 2, pin_memory=False)
    assert loader.multiprocessing_context.get_start_method() == "forkserver"


def test_a_plan_set_while_loading_counts_from_the_next_step_on() -> None:
    data = make_data()
    sampler = LoadAdaptiveSampler(data, [4], 0)
    sizes = []
    for _, labels in make_loader(data, sampler, 0, pin_memory=False):
        sizes.append(len(labels))
        sampler.set_plan([7])
    assert sizes == [4, 7, 7, 5]


def test_evaluation_takes_each_sample_once() -> None:
    draw = random.Random(0)
    for _ in range(100):
        length, size, batch = draw.randrange(100), draw.randrange(1, 9), draw.randrange(1, 20)
        shares = [draw.uniform(0.1, 3.0) for _ in range(size)]
        ranks = [evaluation_indices(length, rank, shares, batch) for rank in range(size)]
        taken = [index for rank in ranks for indices in rank for index in indices]
        assert taken == list(range(length))
        assert all(0 < len(indices) <= batch for rank in ranks for indices in rank)
        counts = [sum(map(len, rank)) for rank in ranks]
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - length * share / sum(shares)) <= 1
