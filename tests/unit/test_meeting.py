"""The rendezvous of ranks before they create a group, with threads as ranks."""

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from kaitian_mpi.backend.meeting import Party, clear, meet
from kaitian_mpi.errors import CollectiveError


def nobody(missing):
    return []


def come(store, size, after, limit=30.0, departed=nobody):
    """Let each rank arrive after so many seconds; return each rank's result or error."""
    outcomes = {}

    def run(rank, seconds):
        time.sleep(seconds)
        party = Party("new_group", rank, size, timedelta(seconds=limit))
        try:
            outcomes[rank] = meet(store, party, departed)
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
        outcomes = come(store, 3, {0: 0.0, 1: 0.1, 2: 0.0})
        names |= set(outcomes.values())
        for rank in range(3):
            clear(store, Party("", rank, 3, timedelta()))
        assert store.num_keys() == 0
    assert len(names) == 3


def test_missing_ranks_are_named_also_for_a_rank_that_arrives_late():
    outcomes = come(dist.HashStore(), 4, {0: 0.0, 1: 1.2, 3: 0.1}, limit=0.5)
    told = "timed out after 0.5 s in new_group: waiting for ranks 1, 2 of 4"
    assert outcomes == {0: told, 1: told, 3: told}


def test_a_rank_that_has_left_the_job_is_not_waited_for():
    began = time.monotonic()
    outcomes = come(
        dist.HashStore(), 3, {0: 0.0, 2: 0.0}, departed=lambda missing: [r for r in missing if r]
    )
    told = "new_group: rank 1 of 3 left the job before coming here; every rank must call it"
    assert outcomes == {0: told, 2: told}
    assert time.monotonic() - began < 5


def test_one_rank_needs_no_store():
    assert meet(None, Party("new_group", 0, 1, timedelta(seconds=1)), nobody)
