"""Weights in files: which a model starts from, what an exported file holds, and what fails."""

import errno
import os
import sys
from functools import partial

import pytest
import torch
from mistakes import one_line_error
from torch import nn

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import RankLostError, StorageError, UserError
from kaitian_mpi.train import setup
from kaitian_mpi.train.weight_files import check_export, export_weights, load_weights

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'export'")


class Language(nn.Module):
    """Has tied weights, buffers, and a frozen layer or extra state, which is no tensor."""

    def __init__(self, words=5, frozen=False):
        super().__init__()
        self.embedding = nn.Embedding(words, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, words, bias=False)
        self.head.weight = self.embedding.weight
        if frozen:
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.register_buffer("seen", torch.ones(3, 2, dtype=torch.bool))


Frozen = partial(Language, frozen=True)


class Counting(Language):
    def get_extra_state(self):
        return {"seen": 7}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def some(**changed):
    """Return other weights than those of a new model, some of them changed."""
    model = Language()
    with torch.no_grad():
        for number, value in enumerate(model.state_dict().values()):
            value.copy_(torch.arange(value.numel()).reshape(value.shape) + number)
    changes = {name.replace("_", "."): change for name, change in changed.items()}
    return {n: changes[n](v) if n in changes else v for n, v in model.state_dict().items()}


def without(*names):
    return {name: value for name, value in some().items() if name not in names}


def with_prefix(prefix):
    return {prefix + name: value for name, value in some().items()}


def in_bf16():
    return {n: v.bfloat16() if v.is_floating_point() else v for n, v in some().items()}


FITTING = {
    "as saved": some, "one of two tied weights": lambda: without("embedding.weight"),
    "the other one": lambda: without("head.weight"), "of DDP": lambda: with_prefix("module."),
    "compiled": lambda: with_prefix("_orig_mod."),
    "compiled, of DDP": lambda: with_prefix("module._orig_mod."),
    "in a checkpoint": lambda: {"model": some(), "optimizers": [{}], "progress": {"step": 3}},
    "as in torch's tutorial": lambda: {"epoch": 3, "model_state_dict": some()}, "bf16": in_bf16,
    "not contiguous": lambda: some(embedding_weight=lambda value: value.T.contiguous().T),
}  # fmt: skip


@pytest.mark.parametrize("name", FITTING)
def test_weights_of_the_same_model_are_loaded(tmp_path, name):
    path = str(tmp_path / "start.pt")
    torch.save(FITTING[name](), path)
    model, counting = Language(), Counting()
    load_weights(model, path)
    expected = some() | {"embedding.weight": some()["head.weight"]}  # the last one filled is both
    for key, value in model.state_dict().items():
        assert value.tolist() == expected[key].tolist()
    load_weights(counting, path)  # extra state may be missing
    torch.save(Counting().state_dict(), path)
    load_weights(counting, path)
    assert counting.seen == 7


UNFIT = "the weights do not fit: .*"
WRONG = {
    "another head": (lambda: Language(7).state_dict(), f"{UNFIT}mismatch for embedding.weight"),
    "another architecture": (
        nn.Linear(3, 3).state_dict,
        f"{UNFIT}has no 'weight'.* lacks 'embedding.weight'.*; give the weights of exactly this",
    ),
    "both tied weights missing": (
        lambda: without("embedding.weight", "head.weight"),
        f"{UNFIT}the file lacks 'embedding.weight'; the file lacks 'head.weight'",
    ),
    "no tensor": (lambda: some(norm_weight=lambda _: 3), f"{UNFIT}norm"),
    "sparse": (lambda: some(norm_weight=torch.Tensor.to_sparse), f"{UNFIT}norm.weight"),
    "two models": (
        lambda: {"model": some(), "state_dict": some()},
        "it has no weights .it has both 'model' and 'state_dict'",
    ),
    "a whole module": (Language, "it has no weights .it holds more than tensors and plain"),
    "a list": (lambda: [torch.ones(1)], "it has no weights .it holds a list without tensors by"),
    "nothing": (dict, "it has no weights .it holds a dict without tensors by name"),
    "a name of two lines": (lambda: some() | {"a\nb": torch.ones(1)}, rf"{UNFIT}no 'a\\nb'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_content_is_a_one_line_error(tmp_path, name):
    make, message = WRONG[name]
    path = tmp_path / "start.pt"
    torch.save(make(), path)
    with one_line_error(f"^--init {path}: {message}"):
        load_weights(Language(), str(path))


@pytest.mark.parametrize("name", ["start.pt", "start.safetensors"])
def test_a_damaged_or_missing_file_is_a_one_line_error(tmp_path, name):
    path, other = tmp_path / name, tmp_path / "other"
    torch.save(some(), path if name == "start.pt" else other)
    safetensors.save_model(Language(), str(other if name == "start.pt" else path))
    content, nothing = path.read_bytes(), "it has no weights"
    for damaged, message in (
        *((b"", nothing), (content[: len(content) // 2], nothing), (other.read_bytes(), nothing)),
        (None, "No such file or directory; name a file that can be read"),
    ):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        with one_line_error(f"^--init {path}: {message}"):
            load_weights(Language(), str(path))


def test_a_rank_lost_while_the_first_weights_are_sent_leaves_each_ranks_own(monkeypatch):
    """Whoever follows rank 0 starts from them."""

    def leave_garbage(tensor, src):
        tensor.fill_(7)
        raise RankLostError("a rank is lost")

    monkeypatch.setattr(setup.dist, "broadcast", leave_garbage)
    model = Language()
    before = values(model)
    with pytest.raises(RankLostError):
        setup.broadcast_model(model)
    assert values(model) == before


# Exported weights


def transposed():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(4, 5))
    model[1].weight = nn.Parameter(model[0].weight.detach().T)  # tied, and not contiguous
    return model


def with_buffers(**buffers):
    model = nn.Linear(2, 2)
    for name, value in buffers.items():
        model.register_buffer(name, value)
    return model


def parts(all=None):
    """Return a model whose buffers are parts of one tensor, which is a weight itself or is not."""
    memory = torch.arange(12.0)
    if all:
        return with_buffers(all=memory, some=memory[2:5])
    return with_buffers(first=memory[:6], last=memory[6:].view(2, 3).T)


MODELS = {
    "tied": Frozen, "transposed": transposed, "views": parts, "window": partial(parts, all=True),
    "bf16": lambda: Frozen().bfloat16(), "float64": lambda: Frozen().double(),
    "complex": lambda: nn.Linear(2, 2, dtype=torch.complex64),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "compiled": lambda: torch.compile(Frozen()),
    "one part compiled": lambda: nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2)),
    "empty": lambda: nn.Sequential(nn.Linear(2, 2), nn.Embedding(0, 4)),
}  # fmt: skip


def values(model):
    tensors = (value for value in model.state_dict().values() if isinstance(value, torch.Tensor))
    return [(value.dtype, value.tolist()) for value in tensors]


@pytest.mark.parametrize("name", MODELS)
def test_the_users_own_model_loads_the_file(tmp_path, name):
    path = str(tmp_path / "model.safetensors")
    model = MODELS[name]()
    before = values(model)
    own = MODELS[name]()
    own = getattr(own, "_orig_mod", own)
    if name == "one part compiled":
        own[0] = own[0]._orig_mod
    check_export(TrainConfig(export=path), model, 0)
    assert os.listdir(tmp_path) == []
    export_weights(path, model)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    with torch.no_grad():
        for value in (*own.parameters(), *own.buffers()):
            value.zero_()
    if name in ("transposed", "views"):  # load_model refuses such models, whatever the file
        own.load_state_dict(safetensors.load_file(path), strict=False)
    else:
        safetensors.load_model(own, path)
    assert values(own) == values(model) == before
    again = MODELS[name]()
    load_weights(again, path)
    assert values(again) == before
    if name == "tied":  # they are written once
        names = safetensors.load_file(path).keys()
        assert ("embedding.weight" in names, "head.weight" in names) == (True, False)
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}


def test_a_full_disk_leaves_the_earlier_file(tmp_path, monkeypatch):
    path, target = tmp_path / "link.safetensors", tmp_path / "elsewhere/model.safetensors"
    path.symlink_to(target)
    export_weights(str(path), nn.Linear(2, 2))  # makes the folder
    assert path.is_symlink()
    before = target.read_bytes()
    assert sorted(safetensors.load_file(target)) == ["bias", "weight"]

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)  # as some file systems report it
    with pytest.raises(StorageError, match=r"could not be written: No space left .* needed, "):
        export_weights(str(path), nn.Linear(2, 3))
    assert (target.read_bytes(), os.listdir(target.parent)) == (before, ["model.safetensors"])


def test_what_prevents_an_export_is_found_early(tmp_path, monkeypatch):
    for model, message in (
        (nn.Linear(2, 2, dtype=torch.complex128), "complex128"),
        (with_buffers(adjacent=torch.eye(2).to_sparse()), "sparse"),
    ):
        with one_line_error(f"^--export m.safetensors: a .*cannot hold.*{message}"):
            check_export(TrainConfig(export="m.safetensors"), model, 1)
    run = tmp_path / "run"
    config = TrainConfig(run_dir=str(run), export=str(run / "m.safetensors"))
    check_export(config, nn.Linear(2, 2), 0)  # in a folder that will be made
    assert not run.exists()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(UserError, match=r"safetensors is not installed; pip install 'kaitian"):
        check_export(config, nn.Linear(2, 2), 1)
