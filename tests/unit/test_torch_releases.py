"""Differences between torch releases: the names of a vendor backend's methods."""

from functools import partial
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import AllgatherOptions

from kaitian_mpi.distributed.collectives import torch_releases as releases

OPTIONS = AllgatherOptions()


# Names as in ProcessGroupNCCL of torch 2.14, and of 2.8 to 2.13.
@pytest.mark.parametrize(
    ("has", "start", "tensors", "called"),
    [
        (
            *("all_gather_single_coalesced _allgather_base", releases.all_gather_single),
            *("ab", [("all_gather_single_coalesced", ["a", "b"], ["x", "y"])]),
        ),
        (
            *("_allgather_base", releases.all_gather_single, "ab"),
            [("_allgather_base", "a", "x"), ("_allgather_base", "b", "y")],
        ),
        (
            *("_reduce_scatter_base", releases.reduce_scatter_single, "a"),
            [("_reduce_scatter_base", "a", "x")],
        ),
        (
            *("alltoall_base", partial(releases.all_to_all_single, ([1], [1])), "a"),
            [("alltoall_base", "a", "x", [1], [1])],
        ),
    ],
)
def test_an_operation_is_found_under_the_librarys_name_for_it(has, start, tensors, called):
    calls = []
    methods = {name: partial(lambda *call: calls.append(call), name) for name in has.split()}
    works = start(OPTIONS, SimpleNamespace(**methods), [*tensors], [*"xy"][: len(tensors)])
    assert calls == [(*call, OPTIONS) for call in called]
    assert len(works) == len(called)
