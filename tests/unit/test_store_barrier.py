"""The barrier in a store before a group is created, with threads as ranks."""

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from kaitian_mpi.distributed.store_barrier import clear_store_barrier, store_barrier
from kaitian_mpi.errors import CollectiveError


def arrive(store, size, after, departed=lambda missing: []):
    """Let each rank arrive after so many seconds; return each rank's result or error."""
    outcomes = {}

    def run(rank, seconds):
        time.sleep(seconds)
        timeout = timedelta(seconds=30)
        try:
            outcomes[rank] = store_barrier(store, "new_group", rank, size, timeout, departed)
        except CollectiveError as error:
            outcomes[rank] = str(error)

    threads = [threading.Thread(target=run, args=item) for item in after.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_all_ranks_get_the_same_name_and_a_new_one_each_time():
    store, names = dist.HashStore(), set()
    for _ in range(3):
        outcomes = arrive(store, 3, {0: 0.0, 1: 0.1, 2: 0.0})
        names |= set(outcomes.values())
        for rank in range(3):
            clear_store_barrier(store, rank)
        assert store.num_keys() == 0
    assert len(names) == 3


def test_a_rank_that_has_left_the_job_is_not_waited_for():
    outcomes = arrive(
        dist.HashStore(), 3, {0: 0.0, 2: 0.0}, departed=lambda missing: [r for r in missing if r]
    )
    message = "new_group: rank 1 of 3 left the job without calling it; every rank must call it"
    assert outcomes == {0: message, 2: message}  # not that of a timeout
