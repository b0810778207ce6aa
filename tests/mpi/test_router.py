"""Which of its carriers a router gives a collective to; the carriers are planted."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, BarrierOptions, BroadcastOptions

from kaitian_mpi.distributed.collectives.operations import AllReduce, Barrier, Broadcast, SparseSum
from kaitian_mpi.distributed.collectives.router import Router
from kaitian_mpi.distributed.collectives.staging import SideStreams
from kaitian_mpi.distributed.collectives.work import Finished
from kaitian_mpi.distributed.collectives.worker import Worker
from kaitian_mpi.errors import UnsupportedError


class Carrier:
    """Stands for host memory or the hybrid allreduce, and notes what it is given."""

    rank, size = 0, 2

    def __init__(self, name, carried, kinds=1):
        self.comms = SimpleNamespace(groups=range(kinds))
        for method in ("allreduce", "broadcast", "sum_sparse", "barrier"):
            setattr(self, method, lambda *_: carried.append(name))


class Library:
    """A vendor's, of float32 alone; `in_place` says whether tensors are where it needs them."""

    is_present = True

    def __init__(self, carried, in_place):
        self.carried, self.in_place = carried, in_place
        self.work = Finished([])

    def group_for(self, _, dtypes, op):
        return self if set(dtypes) == {torch.float32} else None

    def can_use_in_place(self, _):
        return self.in_place

    def start(self, _):
        self.carried.append("library")
        return self

    def finish(self):
        self.carried.append("copied back")


def route(collective, *, kinds=1, in_place=True, check=None):
    """Return who carries out a collective in a group of so many device kinds, in order."""
    carried = []
    host, hybrid = Carrier("host", carried), Carrier("hybrid", carried, kinds)
    streams = SideStreams()
    worker = Worker("test", streams)
    if check is not None:
        check = check(carried)
    library = Library(carried, in_place)
    Router(library, host, hybrid, worker, streams, check).run(collective).wait()
    worker.close()
    return carried


def sum_of(*tensors):
    return AllReduce(list(tensors), [], AllreduceOptions(), dist.ReduceOp(dist.ReduceOp.SUM))


FLOAT, INT = torch.ones(2), torch.ones(2, dtype=torch.int64)
SPARSE = torch.eye(2).to_sparse()
BROADCAST = Broadcast([FLOAT], [], BroadcastOptions(), root=0)


@pytest.mark.parametrize(
    ("collective", "of_one_kind", "of_two_kinds"),
    [
        (sum_of(FLOAT), "library", "hybrid"),
        (sum_of(INT), "host", "hybrid"),
        (BROADCAST, "library", "hybrid"),
        (SparseSum([SPARSE], [], AllreduceOptions()), "host", "hybrid"),
        (Barrier([], [], BarrierOptions()), "host", "hybrid"),
    ],
    ids=["sum", "type not taken", "broadcast", "sparse", "barrier"],
)
def test_the_route_follows_from_kinds_operation_and_type(collective, of_one_kind, of_two_kinds):
    assert route(collective) == [of_one_kind]
    assert route(collective, kinds=2) == [of_two_kinds]


def test_a_library_gets_copies_of_what_it_cannot_use_in_place():
    assert route(BROADCAST, in_place=False) == ["library", "copied back"]


@pytest.mark.parametrize("tensor", [FLOAT, INT], ids=["library", "host"])
def test_the_ranks_calls_are_compared_before_either_route(tensor):
    class Check:
        def __init__(self, carried):
            self.carried = carried

        def compare(self, _):
            self.carried.append("compared")

        def before(self, call, collective):
            return lambda: (self.compare(collective), call())

    carried = route(sum_of(tensor), check=Check)
    assert carried[0] == "compared"
    assert len(carried) == 2


def test_nothing_is_carried_for_meta_tensors_and_nothing_sent_that_cannot_be_reduced():
    assert route(sum_of(torch.ones(2, device="meta"))) == []
    with pytest.raises(UnsupportedError, match="only the sum of all_reduce takes"):
        route(sum_of(SPARSE))
    bitwise = dist.ReduceOp(dist.ReduceOp.BAND)
    wrong = AllReduce([FLOAT.double()], [], AllreduceOptions(), bitwise)
    with pytest.raises(UnsupportedError, match="is not supported by kaitian"):
        route(wrong)
