"""Digests of datasets, by which ranks compare their samples."""

import random
import time

import numpy as np
import torch
from torch.utils.data import Dataset

from kaitian_mpi.recipes.datasets import batches_of_pairs
from kaitian_mpi.train.data import sample_digest
from kaitian_mpi.train.data.sample_digest import digest_samples


class Samples(Dataset):
    """Sample i is [i, i] with class i % 3, optionally with random augmentation."""

    def __init__(self, order, is_random=False):
        self.order, self.is_random = list(order), is_random

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        value = self.order[index]
        if value == -1:
            raise OSError("cannot be read")
        inputs = torch.full((2,), float(value))
        if self.is_random:
            inputs += torch.rand(2) + np.random.rand() + random.random()
        return inputs, value % 3

    def __getitems__(self, indices):
        raise AssertionError("counts what is fetched for training")


def digests(order, **options):
    return digest_samples(batches_of_pairs(Samples(order, **options)))


def test_digests_depend_on_data_and_order():
    assert digests(range(100)) == digests(range(100))
    assert [len(digests(data)) for data in (range(100), range(1), range(2, 5))] == [16, 1, 3]
    assert digests([0, -1, 2])[-1] == ("sample 1 raises OSError", "")
    shuffled = random.Random(1).sample(range(100), 100)
    texts = [[text for text, _ in digests(order)] for order in (range(100), shuffled)]
    assert texts[0] != texts[1]
    assert texts[0][0] == "sample 99: 1x2 float32, 1 int64 [0]"
    one, other = digests(range(0, 300, 3)), digests(range(3, 303, 3))  # of other inputs alone
    assert [text for text, _ in one] == [text for text, _ in other]
    assert {digest for _, digest in one}.isdisjoint(digest for _, digest in other)


def test_reading_stops_when_the_time_is_up(monkeypatch):
    monkeypatch.setattr(sample_digest, "_MAX_SEC", 0.02)
    monkeypatch.setattr(sample_digest, "_digest", lambda data, index: time.sleep(0.01))
    assert 1 <= len(digests(range(100))) <= 3


def test_random_augmentation_does_not_affect_digests_or_the_generators():
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    one = digests(range(20), is_random=True)
    assert states() == before
    torch.rand(7), np.random.rand(7), random.random()
    assert digests(range(20), is_random=True) == one
    assert one != digests(range(20))
