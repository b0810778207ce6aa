"""Differences between torch releases: the names of a vendor backend's methods."""

from functools import partial

import pytest
from torch._C._distributed_c10d import AllgatherOptions

from kaitian_mpi.distributed.collectives import torch_releases

OPTIONS = AllgatherOptions()


class Library:
    """A vendor's process group that has only some methods."""

    def __init__(self, *names):
        self.called = []
        for name in names:
            setattr(self, name, self.method(name))

    def method(self, name):
        def call(*arguments):
            self.called.append((name, *arguments))
            return len(self.called)

        return call


# Names as in ProcessGroupNCCL of torch 2.14, and of 2.8 to 2.13.
@pytest.mark.parametrize(
    ("has", "start", "arguments", "called"),
    [
        (
            ["all_gather_single_coalesced", "_allgather_base"],
            torch_releases.all_gather_single,
            (["a", "b"], ["x", "y"]),
            [("all_gather_single_coalesced", ["a", "b"], ["x", "y"], OPTIONS)],
        ),
        (
            ["_allgather_base"],
            torch_releases.all_gather_single,
            (["a", "b"], ["x", "y"]),
            [("_allgather_base", "a", "x", OPTIONS), ("_allgather_base", "b", "y", OPTIONS)],
        ),
        (
            ["_reduce_scatter_base"],
            torch_releases.reduce_scatter_single,
            (["a"], ["x"]),
            [("_reduce_scatter_base", "a", "x", OPTIONS)],
        ),
        (
            ["alltoall_base"],
            partial(torch_releases.all_to_all_single, ([1], [1])),
            (["a"], ["x"]),
            [("alltoall_base", "a", "x", [1], [1], OPTIONS)],
        ),
    ],
)
def test_an_operation_is_found_under_the_librarys_name_for_it(has, start, arguments, called):
    library = Library(*has)
    works = start(OPTIONS, library, *arguments)
    assert library.called == called
    assert works == [*range(1, len(called) + 1)]
