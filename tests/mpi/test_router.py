"""Which of its carriers a router gives a collective to; the carriers are planted."""

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

from kaitian_mpi.distributed.collective_calls import CollectiveCalls
from kaitian_mpi.distributed.collectives.router import Router
from kaitian_mpi.distributed.collectives.staging import SideStreams
from kaitian_mpi.distributed.collectives.work import Finished
from kaitian_mpi.distributed.collectives.worker import Worker
from kaitian_mpi.errors import UnsupportedError


class Carrier:
    """Stands for host memory or the hybrid allreduce, and notes what it is given."""

    rank, size = 0, 2

    def __init__(self, name, carried):
        for method in ("allreduce", "broadcast", "sum_sparse", "barrier"):
            setattr(self, method, lambda *_: carried.append(name))


class Library:
    """A vendor's, of float32 alone; `in_place` says whether tensors are where it needs them."""

    def __init__(self, carried, in_place):
        self.carried, self.in_place = carried, in_place

    def serves(self, _, dtypes, op):
        return set(dtypes) == {torch.float32}

    def can_use_in_place(self, _):
        return self.in_place

    def start(self, _):
        self.carried.append("library")
        return [Finished([])], lambda: self.carried.append("copied back")


class Calls(CollectiveCalls):
    """A process group's methods, whose collectives a router with planted carriers gets."""

    def __init__(self, router):
        super().__init__(0, 2)
        self._run = router.run


def route(call, *, kinds=1, in_place=True):
    """Return who carries out a collective in a group of so many device kinds, in order."""
    carried = []
    host = Carrier("host" if kinds == 1 else "hybrid", carried)
    streams = SideStreams()
    worker = Worker("test", streams)
    library = Library(carried, in_place) if kinds == 1 else None
    call(Calls(Router(library, host, worker, streams))).wait()
    worker.close()
    return carried


def sum_of(tensor):
    return lambda group: group.allreduce([tensor])


def broadcast(group):
    return group.broadcast([FLOAT])


FLOAT, INT = torch.ones(2), torch.ones(2, dtype=torch.int64)
SPARSE = torch.eye(2).to_sparse()


@pytest.mark.parametrize(
    ("call", "of_one_kind", "of_two_kinds"),
    [
        (sum_of(FLOAT), "library", "hybrid"),
        (sum_of(INT), "host", "hybrid"),
        (broadcast, "library", "hybrid"),
        (sum_of(SPARSE), "host", "hybrid"),
        (lambda group: group.barrier(), "host", "hybrid"),
    ],
    ids=["sum", "type not taken", "broadcast", "sparse", "barrier"],
)
def test_the_route_follows_from_kinds_operation_and_type(call, of_one_kind, of_two_kinds):
    assert route(call) == [of_one_kind]
    assert route(call, kinds=2) == [of_two_kinds]


def test_a_library_gets_copies_of_what_it_cannot_use_in_place():
    assert route(broadcast, in_place=False) == ["library", "copied back"]


def test_nothing_is_carried_for_meta_tensors_and_nothing_sent_that_cannot_be_reduced():
    assert route(sum_of(torch.ones(2, device="meta"))) == []
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    with pytest.raises(UnsupportedError, match="only the sum of all_reduce takes"):
        route(lambda group: group.allreduce([SPARSE], options))
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.BAND)
    with pytest.raises(UnsupportedError, match="is not supported by kaitian"):
        route(lambda group: group.allreduce([FLOAT.double()], options))
