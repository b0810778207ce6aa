"""make_loader and evaluation_indices."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
from multiprocessing import reduction

import pytest
import torch
from jobs import PYTHON, forked

from kaitian_mpi.data.batches import Batches, StepBatches
from kaitian_mpi.data.loader import evaluation_indices, make_loader
from kaitian_mpi.data.sampler import LoadAdaptiveSampler
from kaitian_mpi.data.shared_tensors import SharedTensors
from kaitian_mpi.datasets.arrays import ImageArrays
from kaitian_mpi.datasets.augment import Augmented
from kaitian_mpi.errors import UserError


def make_data() -> Augmented:
    images = torch.randint(0, 256, (23, 3, 32, 32), dtype=torch.uint8)
    arrays = ImageArrays(images, torch.arange(23), (0.5,) * 3, (0.25,) * 3)
    return Augmented(arrays, "crop-flip", seed=0)


# A worker takes seconds to import torch, so one test covers everything that needs one.
@pytest.mark.parametrize("workers", [0, 1])
def test_each_index_list_is_a_batch(workers: int) -> None:
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


class Stopping(dict[int, int]):
    """Raises StopIteration for a sample that it does not have."""

    def __missing__(self, index: int) -> int:
        raise StopIteration


def stop(_: object) -> int:
    raise StopIteration


@pytest.mark.parametrize(
    "batches",
    [Batches(Stopping({0: 0})), Batches([0, 1], collate=stop)],
    ids=["dataset", "collate"],
)
def test_stop_iteration_in_the_users_code_does_not_end_the_epoch(batches: Batches) -> None:
    loader = make_loader(StepBatches(batches, None, 1), [[0], [1]], 0, pin_memory=False)
    with pytest.raises(RuntimeError, match="the dataset, or collate, raised StopIteration"):
        list(loader)


class TooFew(list[int]):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices[1:]]


def test_a_dataset_has_to_return_all_samples_that_it_is_asked_for() -> None:
    message = "__getitems__ of TooFew returned 1 samples for 2 indices; return one for each"
    with pytest.raises(UserError, match=message):
        Batches(TooFew([0, 1]))[[0, 1]]


def test_workers_are_not_forked() -> None:
    data = make_data()
    loader = make_loader(data, LoadAdaptiveSampler(data, [4], 0), 2, pin_memory=False)
    assert loader.multiprocessing_context.get_start_method() == "forkserver"


def test_a_plan_set_while_loading_applies_from_the_next_step() -> None:
    data = make_data()
    sampler = LoadAdaptiveSampler(data, [4], 0)
    sizes = []
    for _, labels in make_loader(data, sampler, 0, pin_memory=False):
        sizes.append(len(labels))
        sampler.set_plan([7])
    assert sizes == [4, 7, 7, 5]


def test_evaluation_covers_each_sample_once() -> None:
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


def test_a_batch_from_a_worker_equals_what_was_sent(monkeypatch) -> None:
    def refuse(storage: torch.UntypedStorage) -> None:
        raise AssertionError("a file in /dev/shm")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", refuse)
    whole = torch.arange(12.0).reshape(3, 4)
    sent = [
        whole,
        whole[:, 1],
        torch.zeros(0, 3),
        torch.ones(1, 5).expand(4, 5),
        torch.tensor(3),
        torch.ones(2, dtype=torch.bfloat16),
        {"text": "x", "number": 7},
    ]
    got = pickle.loads(reduction.ForkingPickler.dumps(SharedTensors(sent)))
    for one, other in zip(got[:-1], sent[:-1], strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
    assert got[-1] == sent[-1]
    got[1] += 1  # a view of the whole there as well, and no view of what is here
    assert torch.equal(got[0][:, 1], whole[:, 1] + 1)
    assert pickle.loads(reduction.ForkingPickler.dumps(SharedTensors("nothing"))) == "nothing"


LOAD = """
import torch
from kaitian_mpi.data.sampler import LoadAdaptiveSampler
from kaitian_mpi.data.loader import make_loader
from kaitian_mpi.datasets.user_dataset import CollatedDataset
from torch.utils.data import TensorDataset

if __name__ == "__main__":
    images = torch.arange(64.0).reshape(64, 1).expand(64, 100_000).clone()
    data = CollatedDataset(TensorDataset(images, torch.arange(64)))
    sampler = LoadAdaptiveSampler(data, [8], 0)
    for inputs, labels in make_loader(data, sampler, 1, pin_memory=False):
        assert torch.equal(inputs[:, -1], labels.float())
    print("loaded")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small /dev/shm, as root")
def test_workers_need_only_a_small_dev_shm(tmp_path) -> None:
    (tmp_path / "load.py").write_text(LOAD)
    mount = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$0" "$@"'
    words = ["unshare", "-m", "sh", "-c", mount, *forked([PYTHON, str(tmp_path / "load.py")])]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.stdout == "loaded\n", ended.stderr
