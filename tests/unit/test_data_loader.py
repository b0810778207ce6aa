"""ShareLoader and evaluation_indices."""

import os
import pickle
import random
import subprocess
from multiprocessing import reduction

import numpy as np
import psutil
import pytest
import torch
from jobs import PYTHON, forked

from kaitian_mpi.errors import UserError
from kaitian_mpi.train.data.batches import Batches, Share, place, split_share
from kaitian_mpi.train.data.loader import ShareLoader
from kaitian_mpi.train.data.shared_tensors import SharedTensors
from kaitian_mpi.train.evaluation import evaluation_indices


def shares(epoch, count=6):
    return (Share(epoch, 10 * epoch + step, [(1, [step]), (2, [3, 4])]) for step in range(count))


class Samples(dict[int, int]):
    """Raises StopIteration for a sample that it does not have, and loses one of two."""

    def __missing__(self, index):
        raise StopIteration

    def __getitems__(self, indices):
        return [self[index] for index in indices[: 3 - len(indices)]]


def stop(_):
    raise StopIteration


def test_mistakes_in_the_users_dataset_or_collate_do_not_end_the_epoch():
    for batches in (Batches(Samples({0: 0})), Batches([0, 1], collate=stop)):
        loading = ShareLoader(batches, 0, pin_memory=False).load(shares(0))
        with pytest.raises(RuntimeError, match="the dataset, or collate, raised StopIteration"):
            list(loading)
    message = "__getitems__ of Samples returned 1 samples for 2 indices; return one for each"
    with pytest.raises(UserError, match=message):
        Batches(Samples({0: 0, 1: 1}))[[0, 1]]


def test_workers_that_cannot_be_sent_a_lambda_say_what_to_do():
    loader = ShareLoader(Batches([0, 1], collate=lambda rows: rows), 1, pin_memory=False)
    with pytest.raises(UserError, match=r"fork server starts: .*lambda.*; use functions"):
        loader.load(shares(0))
    loader.close()


class Refusing(Samples):
    """Raises a mistake of the user's for a sample."""

    def __getitem__(self, index):
        raise UserError(f"sample {index} is wrong")


def test_a_mistake_that_a_worker_meets_is_one_line():
    for workers in (0, 1):
        loader = ShareLoader(Batches(Refusing({0: 0})), workers, pin_memory=False)
        with pytest.raises(UserError, match=r"^sample 0 is wrong$"):
            list(loader.load(shares(0)))
        loader.close()


@pytest.mark.parametrize(
    ("samples", "limit", "sizes"), [(7, None, [7]), (7, 3, [3, 2, 2]), (0, 3, [0]), (0, None, [0])]
)
def test_a_share_is_split_into_micro_batches(samples, limit, sizes):
    parts = split_share(range(10, 10 + samples), limit, min_batch=2)
    assert [size for size, _ in parts] == sizes
    if samples:
        assert [index for _, part in parts for index in part] == list(range(10, 10 + samples))
    else:
        assert parts == [(0, [0, 1])]  # which stand in


def test_evaluation_covers_each_sample_once():
    draw = random.Random(0)
    for _ in range(100):
        length, size, batch = draw.randrange(100), draw.randrange(1, 9), draw.randrange(1, 20)
        shares = [draw.uniform(0.1, 3.0) for _ in range(size)]
        ranks = [evaluation_indices(length, rank, shares, batch) for rank in range(size)]
        assert [i for rank in ranks for indices in rank for i in indices] == list(range(length))
        assert all(0 < len(indices) <= batch for rank in ranks for indices in rank)
        for rank, share in zip(ranks, shares, strict=True):
            assert abs(sum(map(len, rank)) - length * share / sum(shares)) <= 1


@pytest.mark.filterwarnings("ignore")
def test_a_batch_is_as_collate_returns_it():
    """Of numpy's arrays, torch's loader converts some, and fails at others."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    given = [np.arange(3)[::-1], np.zeros(2, ">f4"), np.array(["2026"], "datetime64[Y]"), nested]
    loading = ShareLoader(Batches([0] * 9, lambda _: given), 0, pin_memory=False).load(shares(0, 1))
    [[(_, batch), _]] = loading
    assert all(one is other for one, other in zip(batch, given, strict=True))
    placed = place([*batch, torch.ones(2, device="meta")], torch.device("cpu"))
    assert placed[0] is given[0]
    assert placed[-1].is_meta
    sent = pickle.loads(reduction.ForkingPickler.dumps(SharedTensors(nested)))
    assert [len(one) for one in sent.unbind()] == [2, 3]


def test_a_batch_from_a_worker_equals_what_was_sent(monkeypatch):
    def refuse(storage):
        raise AssertionError("a file in /dev/shm")

    def received(sent):
        return pickle.loads(reduction.ForkingPickler.dumps(SharedTensors(sent)))

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", refuse)
    whole = torch.arange(12.0).reshape(3, 4)
    sent = [whole, whole[:, 1], torch.zeros(0, 3), torch.ones(1, 5).expand(4, 5), torch.tensor(3)]
    sent += [torch.ones(2, dtype=torch.bfloat16), {"text": "x", "number": 7}]
    got = received(sent)
    for one, other in zip(got[:-1], sent[:-1], strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
    assert got[-1] == sent[-1]
    got[1] += 1  # a view of the whole there as well, and no view of what is here
    assert torch.equal(got[0][:, 1], whole[:, 1] + 1)
    assert received("nothing") == "nothing"


LOAD = """
import torch
from kaitian_mpi.train.data.batches import Share
from kaitian_mpi.train.data.loader import ShareLoader
from kaitian_mpi.recipes.user_data import batches_of_pairs
from torch.utils.data import TensorDataset
if __name__ == "__main__":
    images = torch.arange(64.0).reshape(64, 1).expand(64, 100_000).clone()
    data = batches_of_pairs(TensorDataset(images, torch.arange(64)))
    shares = (Share(0, 0, [(8, list(range(first, first + 8)))]) for first in range(0, 64, 8))
    for [(_, (inputs, labels))] in ShareLoader(data, 1, pin_memory=False).load(shares):
        assert torch.equal(inputs[:, -1], labels.float())
    print("loaded")
"""


@pytest.mark.linux("a small /dev/shm is mounted")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small /dev/shm, as root")
def test_workers_need_only_a_small_dev_shm(tmp_path):
    (tmp_path / "load.py").write_text(LOAD)
    mount = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$0" "$@"'
    words = ["unshare", "-m", "sh", "-c", mount, *forked([PYTHON, str(tmp_path / "load.py")])]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.stdout == "loaded\n", ended.stderr


LIMIT_SEC = 120

# The samples are the ids of the processes that load them.
RANK = f"""
import os, time
from kaitian_mpi.train.data.batches import Share
from kaitian_mpi.train.data.loader import ShareLoader
class Identities:
    def __len__(self):
        return 8
    def __getitem__(self, indices):
        return os.getpid()
if __name__ == "__main__":
    shares = (Share(0, 0, [(1, [index])]) for index in range(8))
    loading = ShareLoader(Identities(), 1, pin_memory=False).load(shares)
    print(os.getpid(), next(loading)[0].batch, flush=True)
    time.sleep({LIMIT_SEC})
"""


def test_a_worker_exits_when_its_rank_is_killed(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    rank = subprocess.Popen(forked([PYTHON, str(script)]), stdout=subprocess.PIPE, text=True)
    with rank:
        rank_pid, loading_pid = map(int, rank.stdout.readline().split())
        loading = psutil.Process(loading_pid)
        fork_server = loading.parent()
        assert fork_server.pid != rank_pid
        rank.kill()
    _, alive = psutil.wait_procs([loading, fork_server], timeout=LIMIT_SEC)
    for process in alive:
        process.kill()
    assert not alive
