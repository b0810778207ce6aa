import time

import pytest

from kaitian_mpi.train.rebalancing import end_with_slow_links, time_links

SLOW_RANK = 1


class SlowLinks:
    """A communicator whose messages are later on the slow rank than a busy machine makes them."""

    def __init__(self, comm):
        self._comm, self.rank, self.size = comm, comm.rank, comm.size

    def Sendrecv(self, *args, **kwargs):  # noqa: N802
        if self.rank == SLOW_RANK:
            time.sleep(0.1)
        self._comm.Sendrecv(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._comm, name)


@pytest.mark.ranks(3)
def test_every_rank_finds_the_rank_with_slow_links(world):
    ends = list(range(world.size))
    links = time_links(SlowLinks(world.comm), ends)
    assert len(links) == world.size
    rank, factor = end_with_slow_links(links)
    assert rank == SLOW_RANK
    assert factor > 2


@pytest.mark.ranks(4)
def test_ranks_outside_the_ring_only_receive_the_result(world):
    links = time_links(world.comm, [0, 1, 3])
    assert len(links) == 3
    assert min(links) > 0
