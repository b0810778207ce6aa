"""Files whose tensors are mapped, and what is taken over from them."""

from collections import OrderedDict

import pytest
import torch

from kaitian_mpi.observe import tensor_files
from kaitian_mpi.observe.tensor_files import UnusableError, map_tensors, tensors_in
from kaitian_mpi.train import state_transfer
from kaitian_mpi.train.state_transfer import copy_state

LARGE = 5 << 20  # more than a piece


@pytest.fixture
def saved(tmp_path):
    """A state of several types and layouts, and its file."""
    torch.manual_seed(0)
    tied = torch.randn(200, 300)
    state = {
        "large": torch.arange(LARGE),
        "tied": [tied, tied],
        "image": torch.randn(8, 16, 32, 32).to(memory_format=torch.channels_last),
        "slice": torch.randn(400, 400)[:, ::2],
        "brief": torch.randn(70_000).to(torch.bfloat16),
        "small": (torch.tensor(3.5), torch.zeros(0, 5), torch.tensor([True])),
        "plain": {1: [None, True, "text", 0.25], "ordered": OrderedDict(b=1, a=2)},
    }
    torch.save(state, tmp_path / "state.pt")
    return state, tmp_path / "state.pt"


def assert_same(found, needed):
    pairs = list(zip(tensors_in(found), tensors_in(needed), strict=True))
    assert len(pairs) == 9
    for one, other in pairs:
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert found["image"].stride() == needed["image"].stride()
    assert found["plain"] == needed["plain"]


def test_a_copy_shares_no_memory_with_the_file_which_leaves_memory(saved, monkeypatch):
    state, path = saved
    left, leave = [], state_transfer._leave_memory

    def note(piece):
        left.append(piece.nbytes)
        leave(piece)

    monkeypatch.setattr(state_transfer, "_leave_memory", note)
    file = map_tensors(path)
    assert file.is_mapped
    for _ in range(2):  # what has left can be read again
        left.clear()
        found = copy_state(file.content, is_mapped=True)
        assert_same(found, state)
        assert found["tied"][0] is found["tied"][1]
        assert type(found["plain"]["ordered"]) is OrderedDict
        assert max(left) < state["large"].nbytes
        whole = sum(state[name].nbytes for name in ("large", "image", "brief"))
        assert sum(left) == whole + state["tied"][0].nbytes
        for tensor in tensors_in(found):
            tensor.zero_()
    path.unlink()
    assert_same(file.content, state)


def test_large_tensors_are_copied_in_place_if_they_match(saved):
    state, path = saved
    small = torch.zeros(())
    own = {
        "large": torch.zeros(LARGE, dtype=torch.int64),
        "tied": [torch.zeros(200, 300)],
        "image": torch.zeros(8, 16, 32, 32),  # of another layout
        "brief": torch.zeros(70_000),  # of another type
        "small": (small,),  # may be a setting, which is kept
        "more": torch.zeros(3),
    }
    found = copy_state(map_tensors(path).content, own)
    assert_same(found, state)
    assert found["large"].data_ptr() == own["large"].data_ptr()
    assert found["tied"][1].data_ptr() == own["tied"][0].data_ptr()
    assert small == 0
    assert not own["image"].any()
    assert "more" not in found


def test_a_file_system_that_maps_no_file_is_read_and_plain_values_alone(saved, monkeypatch):
    (state, path), load = saved, torch.load

    def refuse(*args, mmap=False, **options):
        if mmap:
            raise RuntimeError("unable to mmap 41943040 bytes: No such device (19)")
        return load(*args, **options)

    monkeypatch.setattr(tensor_files.torch, "load", refuse)
    file = map_tensors(path)
    assert not file.is_mapped
    assert_same(file.content, state)
    torch.save({"path": path}, path)
    with pytest.raises(UnusableError, match="it holds more than tensors and plain values"):
        map_tensors(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        map_tensors(path)
