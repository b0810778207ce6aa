"""Layout shard under DistributedDataParallel: what rank 0 saves alone, and the memory it takes."""

import copy
import gc
import io
import pickle
import random
import time
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from choices import by_default
from test_memory import MB, in_memory
from test_trainer_shards import (  # noqa: F401
    Data,
    Net,
    Tied,
    adamw,
    give,
    installed,
    loss_of,
    step_once,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard import extend_ddp
from kaitian_mpi.integrations.shard.lazy_value import LazyValue

pytestmark = pytest.mark.thorough(2, 4)
SHARES = 1.0, 3.0, 2.0, 1.0
also_whole = pytest.mark.parametrize(
    "owners", [pytest.param("whole", marks=pytest.mark.thorough), "sharded"], indirect=True
)


@pytest.fixture(params=["whole", "sharded"])
def owners(request, world, installed, monkeypatch):  # noqa: F811
    give(monkeypatch, world, SHARES, request.param == "sharded")
    return request.param


class Lower(Net):
    """Has a layer in bfloat16, and frozen parameters, of which an optimizer has no state."""

    def __init__(self):
        super().__init__()
        self.middle.bfloat16()
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        h = self.middle(torch.tanh(self.first(x)).bfloat16())
        return self.last(torch.tanh(h.double()))


def trained(world, make=Lower, steps=2, **options):
    """Return a model, its optimizer, and what trains them for another step."""
    model = make()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = adamw(groups, amsgrad=True, **options)
    batches = iter(range(100))

    def step():
        step_once(ddp, optimizer, *Data(world, True)(next(batches)))

    for _ in range(steps):
        step()
    return model, optimizer, step


def plain(value):
    """Return a state with copies of its tensors, in plain containers."""
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value).copy_(value) if type(value) is torch.Tensor else value + 0
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def check_same(one, other):
    """Check that two states have the same tensors, bit for bit, and plain values."""
    if isinstance(other, torch.Tensor):
        assert type(one) is torch.Tensor
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert one.device.type == "cpu"
        assert (
            one.numpy(force=True).tobytes() == other.numpy(force=True).tobytes()
            if (one.dtype is not torch.bfloat16)
            else torch.equal(one, other)
        )
    elif isinstance(other, dict):
        assert [*one] == [*other]
        for key, item in other.items():
            check_same(one[key], item)
    elif isinstance(other, list):
        for each, item in zip(one, other, strict=True):
            check_same(each, item)
    else:
        assert one == other


def loaded(state, **options):
    file = io.BytesIO()
    torch.save(state, file, **options)
    file.seek(0)
    return torch.load(file, weights_only=True)


WAYS = {
    "torch_save": loaded,
    "format_before_1_6": lambda state: loaded(state, _use_new_zipfile_serialization=False),
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "deepcopy": copy.deepcopy,
}


@also_whole
@pytest.mark.parametrize("name", by_default(WAYS, ("torch_save", "pickle")))
def test_a_saved_state_is_that_of_one_process(world, owners, name):
    model, optimizer, _ = trained(world)
    if world.rank == 0:
        states = [
            ({**model.state_dict()}, plain({**model.state_dict()})),
            (optimizer.state_dict(), plain(optimizer.state_dict())),
        ]
        for state, expected in states:
            check_same(WAYS[name](state), expected)
        kinds = {value.dtype for value in states[0][1].values()}
        assert kinds == {torch.float64, torch.bfloat16}
        steps = {place: len(state) for place, state in states[1][1]["state"].items()}
        assert set(steps.values()) == {4}
        assert 1 not in steps
    dist.barrier()


@also_whole
def test_a_file_has_the_bytes_of_a_plain_save(world, owners, tmp_path):
    model, optimizer, _ = trained(world)
    if world.rank == 0:
        paths = tmp_path / "saved" / "state.pt", tmp_path / "plain" / "state.pt"
        for state in (model.state_dict(), optimizer.state_dict()["state"][0]):
            copied = copy.deepcopy(state)
            assert [*map(type, copied.values())] == [torch.Tensor] * len(copied)
            for path, content in zip(paths, (state, copied), strict=True):
                path.parent.mkdir(exist_ok=True)
                torch.save(content, path)
            records = [
                {name: file.read(name) for name in file.namelist()}
                for file in map(zipfile.ZipFile, paths)
            ]
            assert records[0] == records[1]
    dist.barrier()


@also_whole
def test_values_that_are_saved_twice_are_in_the_file_once(world, owners, tmp_path):
    model, _, _ = trained(world, make=Tied)
    if world.rank == 0:
        torch.save([model.state_dict(), model.state_dict()], tmp_path / "state.pt")
        names = zipfile.ZipFile(tmp_path / "state.pt").namelist()
        assert sum("/data/" in name for name in names) == 1
    dist.barrier()


@also_whole
def test_functions_of_torch_have_the_values(world, owners):
    model, optimizer, _ = trained(world)
    if world.rank == 0:
        expected = model.last.weight.detach().clone()
        value = model.state_dict()["last.weight"]
        assert torch.equal(copy.copy(value), expected)
        assert torch.equal(value.to(torch.float32), expected.float())
        assert (value.numpy() == expected.numpy()).all()
        value = optimizer.state_dict()["state"][0]["exp_avg"]
        assert isinstance(value, LazyValue)
        assert value.is_contiguous()
        assert value.whole is None
        assert torch.equal(copy.copy(value), value.to(torch.float64))
    dist.barrier()


@also_whole
def test_safetensors_have_the_values(world, owners, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, _, _ = trained(world)
    if world.rank == 0:
        safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
        saved = safetensors.load_file(tmp_path / "model.safetensors")
        for key, value in model.state_dict().items():
            assert torch.equal(saved[key], value)
    dist.barrier()


class Wide(nn.Module):
    """24 MB of parameters, of 4 MB each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.sizes(2, 3)
@also_whole
def test_saving_takes_the_memory_of_one_parameter(world, owners, tmp_path):
    largest, spare = 4 * MB, 3 * MB
    model = Wide()
    ddp = DistributedDataParallel(model)
    optimizer = adamw(model.parameters(), foreach=False)
    ddp(torch.ones(2, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if world.rank == 0:
        torch.save([model.layers[0].state_dict(), *optimizer.state_dict()], tmp_path / "first.pt")
        for make in (model.state_dict, optimizer.state_dict):
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            before, _ = in_memory()
            torch.save(make(), tmp_path / "state.pt")
            assert in_memory()[1] - before < largest + spare
    dist.barrier()


@also_whole
def test_a_kept_state_never_shows_another_step(world, owners):
    """What was read of an optimizer's state stays; what was not is refused."""
    _, optimizer, step = trained(world)
    state = optimizer.state_dict()["state"]
    expected = plain(optimizer.state_dict()["state"]) if world.rank == 0 else {}
    read, unread, step_count = (state[0][name] for name in ("exp_avg", "exp_avg_sq", "step"))
    before = read.clone()
    dist.barrier()
    step()
    assert torch.equal(read, before)
    assert float(step_count) == 2
    if world.rank == 0:
        check_same(before, expected[0]["exp_avg"])
    for use in (
        torch.clone,
        pickle.dumps,
        copy.deepcopy,
        lambda value: torch.save(value, io.BytesIO()),
    ):
        with pytest.raises(UserError, match=r"after the optimizer's next step"):
            use(unread)
    dist.barrier()


@also_whole
def test_a_step_while_values_are_saved_is_refused(world, owners):
    """As by another thread than that which trains."""
    model, _, step = trained(world)
    value = model.state_dict()["last.weight"]
    if owners == "sharded":
        storage = value.__reduce_ex__(2)[1][0]._untyped_storage
        step()
        with pytest.raises(UserError, match="values have changed while they were saved"):
            storage.cpu()
    dist.barrier()


def test_an_optimizer_without_a_step_is_saved(world, owners):
    _, optimizer, _ = trained(world, steps=0)
    assert loaded(optimizer.state_dict())["state"] == {}
    dist.barrier()


@pytest.mark.thorough(1)
@also_whole
@pytest.mark.parametrize("saves", by_default([8, 100], [8]))
def test_saves_at_random_moments_have_the_values_of_their_step(world, owners, shared_path, saves):
    """While the others are in a forward or a backward; bit by bit what the owners had."""
    (shards,) = extend_ddp._active
    model = Lower()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adamw([{"params": [p]} for p in model.parameters()], amsgrad=True)
    moments, kept = random.Random(world.rank), []
    for step in range(saves):
        x, y = Data(world, True)(step)
        loss = loss_of(ddp(x), y)
        if (
            world.rank == 0 and step and moments.random() < 0.3
        ):  # between a forward and its backward
            save(model, optimizer, shared_path / f"{step - 1}.pt")
        time.sleep(moments.choice([0, 0, 0.001, 0.004]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.append(own_rows(shards.model_of(model.last.weight), shards.optimizers.get(optimizer)))
        time.sleep(moments.choice([0, 0, 0.001, 0.004]))
        if world.rank == 0:
            save(model, optimizer, shared_path / f"{step}.pt")
    torch.save(kept, shared_path / f"rows_{world.rank}.pt")
    dist.barrier()
    of_ranks = [torch.load(shared_path / f"rows_{rank}.pt") for rank in range(world.size)]
    for step in range(saves) if world.rank == 0 else ():
        saved = torch.load(shared_path / f"{step}.pt", weights_only=True)
        for pieces in of_ranks:
            for number, name, begin, end, rows in pieces[step]:
                values = saved[1]["state"][number][name] if name else [*saved[0].values()][number]
                assert torch.equal(values[begin:end], rows), (step, number, name)
    dist.barrier()


def save(model, optimizer, path):
    torch.save((model.state_dict(), optimizer.state_dict()), path)


def own_rows(owned, optimizer):
    """Return copies of a rank's rows of all parameters, and of their states."""
    state = optimizer.state.current
    return [
        (number, name, part.begin, part.end, value.detach().clone())
        for number in range(len(owned.parameters))
        for part, target in owned.rows.parts_of(number)
        for name, value in [("", target), *state.get(target, {}).items()]
        if name != "step"
    ]
