"""A large state is saved and loaded without a second copy, from files that are mapped."""

import ctypes
import errno
import gc
import re
import resource
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.observe import folders, tensor_files
from kaitian_mpi.observe.run_folder import DiskFolder
from kaitian_mpi.observe.tensor_files import Spool, UnusableError, map_tensors, tensors_in
from kaitian_mpi.train import state_transfer
from kaitian_mpi.train.checkpoint.files import CheckpointFiles
from kaitian_mpi.train.checkpoint.writer import Checkpoints
from kaitian_mpi.train.state import State, weights
from kaitian_mpi.train.state_transfer import copy_state, from_bytes, to_bytes
from kaitian_mpi.train.task import Computation, Task

MAX_RATIO = 1.3
METADATA = SimpleNamespace(to_json=dict)
WIDTH, LAYERS = 1024, 18


def make_state(width=300, layers=1):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

    task = Task(model=model, data=[0], optimizer=optimizer)
    return State(task, Computation(torch.device("cpu"), "fp32", "contiguous"), 9)


def measure(folder):
    """Print the memory of each operation, with 144 MB of state: half weights, half momentum."""

    def memory(name):
        return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10

    def begin():
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")

    def show(operation):
        ratio = (memory("VmHWM") - empty) / (2 * 4 * WIDTH * WIDTH * LAYERS)
        print(f"{operation}: {ratio:.3f}")

    folders.SHM = folder
    checkpoints = Checkpoints(TrainConfig(snapshots="job", checkpoint_copy_mb=128), None)
    torch.save(torch.ones(9), folder / "first.pt")  # has torch load what it needs
    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1).step()  # the same
    copy_state(map_tensors(folder / "first.pt").content, is_mapped=True)
    empty = memory("VmRSS")

    state = make_state(WIDTH, LAYERS)
    for parameter in state.model.parameters():
        parameter.grad = torch.ones(1, 1).expand_as(parameter)  # takes no memory
    state.optimizers[0].step()
    state.zero_gradients()
    state.progress.step_done(1)
    begin()
    checkpoints.write(checkpoints.in_memory, state, state.shared(), METADATA)
    checkpoints.wait()
    show("snapshot")
    begin()
    DiskFolder(folder / "run").save_model(weights(state.model_state()))
    show("model.pt")
    del state, parameter
    gc.collect()  # torch 2.8's optimizers are part of a cycle

    state = make_state(WIDTH, LAYERS)
    begin()
    state.load_file(checkpoints.in_memory.files.newest_good().file)
    assert (state.progress.step, len(state.optimizers[0].state)) == (1, LAYERS)
    show("load")


@pytest.mark.thorough
def test_saving_and_loading_take_little_more_memory_than_the_state(tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]  # a process of its own
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ratios = {name: float(ratio) for name, ratio in re.findall(r"(\S+): (\S+)", done.stdout)}
    assert list(ratios) == ["snapshot", "model.pt", "load"]
    assert max(ratios.values()) < MAX_RATIO, ratios
    assert min(ratios.values()) > 0.95


@pytest.fixture
def held(tmp_path, monkeypatch):
    """A function that makes writers wait until it is called, and a list of what they write."""
    monkeypatch.setattr(folders, "SHM", tmp_path)
    may_write, states, write = Event(), [], CheckpointFiles.write

    def write_later(files, state, description, only_new=False):
        states.append(state)
        assert may_write.wait(60)
        return write(files, state, description)

    monkeypatch.setattr(CheckpointFiles, "write", write_later)
    return SimpleNamespace(go=may_write.set, states=states)


@pytest.mark.parametrize("copy_mb", [0, 1])
def test_a_checkpoint_has_the_values_of_its_step(tmp_path, held, copy_mb):
    checkpoints = Checkpoints(TrainConfig(checkpoint_copy_mb=copy_mb), tmp_path)
    state, writer = make_state(), checkpoints.on_disk
    before = state.model[0].weight.detach().clone()
    if copy_mb == 0:  # it is on disk when training goes on
        held.go()
    waited = checkpoints.write(writer, state, state.shared(), METADATA)
    assert waited == (copy_mb == 0) == (writer.last_written == 0)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.add_(1)
    held.go()
    checkpoints.wait()
    assert torch.equal(writer.files.newest_good().state["model"]["0.weight"], before)
    is_shared = held.states[0]["model"]["0.weight"].data_ptr() == state.model[0].weight.data_ptr()
    assert is_shared == waited
    assert (writer.take_spare() is None) == waited  # never reused as a buffer


@pytest.mark.filterwarnings("ignore")
def test_a_state_may_have_sparse_and_nested_tensors(tmp_path):
    whole = torch.eye(300)
    state = {"extra": {"coo": whole.to_sparse(), "csr": whole.to_sparse_csr()}}
    nested = [torch.ones(2), torch.ones(3)]
    state["extra"]["jagged"] = torch.nested.nested_tensor(nested, layout=torch.jagged)
    assert not Checkpoints(TrainConfig(), tmp_path)._is_large(state)
    copied = from_bytes(to_bytes(copy_state(state, share=True)))["extra"]
    assert torch.equal(copied["coo"].to_dense(), whole)
    assert torch.equal(copied["csr"].to_dense(), whole)
    assert [len(one) for one in copied["jagged"].unbind()] == [2, 3]


def test_writers_share_one_copy_of_a_large_state_on_a_device(tmp_path, monkeypatch, held):
    config = TrainConfig(checkpoint_copy_mb=0, snapshots="job")
    checkpoints, state = Checkpoints(config, tmp_path), make_state()
    monkeypatch.setattr(checkpoints, "_is_large", lambda shared, on_host=False: not on_host)
    held.go()
    for writer in (checkpoints.on_disk, checkpoints.in_memory, checkpoints.on_disk):
        assert checkpoints.write(writer, state, state.shared(), METADATA)
    checkpoints.wait()
    copies = [written["model"]["0.weight"].data_ptr() for written in held.states]
    assert (len(copies), len({*copies})) == (3, 1)
    assert copies[0] != state.model[0].weight.data_ptr()


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


def assert_same(copied, needed):
    pairs = list(zip(tensors_in(copied), tensors_in(needed), strict=True))
    assert len(pairs) == 9
    for one, other in pairs:
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert copied["image"].stride() == needed["image"].stride()
    assert copied["plain"] == needed["plain"]


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
        copied = copy_state(file.content, is_mapped=True)
        assert_same(copied, state)
        assert copied["tied"][0] is copied["tied"][1]
        assert type(copied["plain"]["ordered"]) is OrderedDict
        assert max(left) < state["large"].nbytes
        whole = sum(state[name].nbytes for name in ("large", "image", "brief"))
        assert sum(left) == whole + state["tied"][0].nbytes
        for tensor in tensors_in(copied):
            tensor.zero_()
    path.unlink()
    assert_same(file.content, state)


def test_a_spool_keeps_rows_until_the_disk_is_full(tmp_path):
    spool, rows = Spool(tmp_path), [torch.randn(300, 64), torch.randn(200, 64)]
    kept = spool.keep(rows)
    assert torch.equal(kept, torch.cat(rows))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        lost = spool.keep(rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert spool.fault.errno == errno.EFBIG
    assert lost.shape == kept.shape
    assert lost.untyped_storage().nbytes() == lost.element_size()
    assert spool.keep(rows).shape == kept.shape  # a state of which a part is missing is of no use
    assert not [*tmp_path.iterdir()]


def test_large_tensors_are_copied_in_place_and_unmapped_files_read_but_no_other_values(
    saved, monkeypatch
):
    state, path = saved
    small = torch.zeros(())
    memory = {
        "large": torch.zeros(LARGE, dtype=torch.int64),
        "tied": [torch.zeros(200, 300)],
        "image": torch.zeros(8, 16, 32, 32),  # of another layout
        "brief": torch.zeros(70_000),  # of another type
        "small": (small,),  # may be a setting, which is kept
        "more": torch.zeros(3),
    }
    copied = copy_state(map_tensors(path).content, memory)
    assert_same(copied, state)
    assert copied["large"].data_ptr() == memory["large"].data_ptr()
    assert (copied["tied"][1].data_ptr(), small) == (memory["tied"][0].data_ptr(), 0)
    assert not memory["image"].any()
    assert "more" not in copied
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


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
