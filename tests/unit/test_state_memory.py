"""A large state is saved and loaded without a second copy of it in memory."""

import ctypes
import gc
import re
import subprocess
import sys
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.observe import folders
from kaitian_mpi.observe.run_folder import DiskFolder
from kaitian_mpi.observe.tensor_files import map_tensors
from kaitian_mpi.train.checkpoint.files import CheckpointFiles
from kaitian_mpi.train.checkpoint.writer import Checkpoints
from kaitian_mpi.train.saving import Saving
from kaitian_mpi.train.state import State
from kaitian_mpi.train.state_transfer import copy_state
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
    checkpoints.write(checkpoints.in_memory, state, METADATA)
    checkpoints.wait()
    show("snapshot")
    begin()
    DiskFolder(folder / "run").save_model(state.weights())
    show("model.pt")
    del state, parameter
    gc.collect()  # torch 2.8's optimizers are part of a cycle

    state = make_state(WIDTH, LAYERS)
    begin()
    state.load_file(checkpoints.in_memory.files.newest_good().file)
    assert state.progress.step == 1
    assert len(state.optimizers[0].state) == LAYERS
    show("load")


def test_saving_and_loading_take_little_more_memory_than_the_state(tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]  # a process of its own
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
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
    waited = checkpoints.write(writer, state, METADATA)
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


def test_writers_share_one_copy_of_a_large_state_on_a_device(tmp_path, monkeypatch, held):
    config = TrainConfig(checkpoint_copy_mb=0, snapshots="job")
    checkpoints, state = Checkpoints(config, tmp_path), make_state()
    monkeypatch.setattr(checkpoints, "_is_large", lambda shared, on_host=False: not on_host)
    held.go()
    for writer in (checkpoints.on_disk, checkpoints.in_memory, checkpoints.on_disk):
        assert checkpoints.write(writer, state, METADATA)
    checkpoints.wait()
    copies = {written["model"]["0.weight"].data_ptr() for written in held.states}
    assert len(held.states) == 3
    assert len(copies) == 1
    assert copies != {state.model[0].weight.data_ptr()}


def test_large_snapshots_take_at_most_a_twentieth_of_the_time(tmp_path, monkeypatch):
    now, made = [100.0], []
    config = TrainConfig(snapshots="job", snapshot_every=1)
    checkpoints = Checkpoints(config, tmp_path)
    world = SimpleNamespace(rank=0, infos=[SimpleNamespace(host="a")], comm=None)
    world.info = world.infos[0]
    saving = Saving.__new__(Saving)
    saving._run, saving._world = SimpleNamespace(config=config, state=make_state()), world
    saving._checkpoints, saving._metadata = checkpoints, lambda: METADATA
    saving._snapshot_sec = saving._snapshot_at = 0.0

    def write(*arguments):
        made.append(now[0])
        now[0] += 3.0
        return True

    monkeypatch.setattr(checkpoints, "write", write)
    monkeypatch.setattr("kaitian_mpi.train.saving.time.monotonic", lambda: now[0])
    saving._run.state.progress.step = 2
    for seconds in (100, 103, 159, 160.1, 161, 1000):
        now[0] = max(now[0], seconds)
        saving._snapshot()
    assert made == [100, 160.1, 1000]


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
