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


def assert_same(received, expected):
    leaves, tree = tree_flatten(received)
    expected_leaves, expected_tree = tree_flatten(expected)
    assert tree == expected_tree
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        assert type(leaf) is type(expected_leaf)
        if isinstance(expected_leaf, torch.Tensor):
            assert leaf.dtype == expected_leaf.dtype
            assert torch.equal(leaf, expected_leaf)
        else:
            assert leaf == expected_leaf


@pytest.mark.thorough(2, 4)
@pytest.mark.ranks(2)
def test_only_ranks_that_want_a_state_receive_it(world):
    expected = make_state()
    root = world.size - 1
    sent = expected if world.rank == root else None
    received = broadcast_state(world.comm, sent, root, receives=world.rank == 0)
    if world.rank != 0:
        assert received is None
        return
    assert_same(received, expected)
    assert received["model"]._metadata == expected["model"]._metadata
    assert received["tied"][0] is received["tied"][1]
    assert received["image"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.thorough(2, 4)
@pytest.mark.ranks(2)
def test_a_state_is_received_into_this_ranks_own_tensors(world):
    expected = make_state()
    # Two of its entries cannot receive: they have another dtype, or another shape.
    into = {**make_state(), "brief": torch.zeros(70_000), "tied": [torch.zeros(300, 200)] * 2}
    weight = into["model"]["weight"].zero_()
    image = into["image"]
    sent = expected if world.rank == 0 else None
    received = broadcast_state(world.comm, sent, 0, receives=world.rank == 1, into=into)
    if world.rank == 1:
        assert_same(received, expected)
        assert received["model"]["weight"].data_ptr() == weight.data_ptr()
        assert received["image"].data_ptr() == image.data_ptr()
        assert torch.equal(weight, expected["model"]["weight"])
