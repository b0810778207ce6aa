"""Sending a state of large and small tensors from one rank to others."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from kaitian_mpi.train.state_transfer import broadcast_state


def make_state():
    """Tensors of several types and layouts, and plain values."""
    torch.manual_seed(0)
    tied = torch.randn(200, 300)
    image = torch.randn(8, 16, 32, 32).to(memory_format=torch.channels_last)
    weights = nn.Linear(300, 200).state_dict()
    return {
        "model": weights, "tied": [tied, tied], "slice": torch.randn(400, 400)[:, ::2],
        "image": image, "more than a piece": torch.arange(5 << 20),
        "brief": torch.randn(70_000).to(torch.bfloat16),
        "turns": torch.randn(20_000, dtype=torch.complex64).conj(),
        "small": (torch.tensor(3.5), torch.zeros(0, 5)),
        "plain": {1: [None, True, "text", 0.25], "ordered": OrderedDict(b=1, a=2)},
    }  # fmt: skip


def assert_same(found, expected):
    (ours, form), (theirs, expected_form) = tree_flatten(found), tree_flatten(expected)
    assert form == expected_form
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert (one, type(one)) == (other, type(other))


@pytest.mark.ranks(2)
def test_only_ranks_that_want_a_state_receive_it(world):
    expected, root = make_state(), world.size - 1
    sent = expected if world.rank == root else None
    found = broadcast_state(world.comm, sent, root, receives=world.rank == 0)
    if world.rank != 0:
        assert found is None
        return
    assert_same(found, expected)
    assert found["model"]._metadata == expected["model"]._metadata
    assert found["tied"][0] is found["tied"][1]
    assert found["image"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.ranks(2)
def test_a_state_is_received_into_this_ranks_own_tensors(world):
    expected = make_state()
    own = {**make_state(), "brief": torch.zeros(70_000), "tied": [torch.zeros(300, 200)] * 2}
    own["model"]["weight"].zero_()
    before = own["model"]["weight"].data_ptr(), own["image"].data_ptr()
    state = expected if world.rank == 0 else None
    found = broadcast_state(world.comm, state, 0, receives=world.rank == 1, into=own)
    if world.rank == 1:
        assert_same(found, expected)
        assert (found["model"]["weight"].data_ptr(), found["image"].data_ptr()) == before
        assert torch.equal(own["model"]["weight"], expected["model"]["weight"])
