"""Exported weights: what a .safetensors file of them holds, and where it cannot be written."""

import errno
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import StorageError, UserError
from kaitian_mpi.train import weight_files
from kaitian_mpi.train.weight_files import (
    check_export,
    check_exportable,
    export_weights,
    load_weights,
)

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'export'")


class Language(nn.Module):
    """Has tied weights, a frozen layer and buffers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.ones(3, 2, dtype=torch.bool))


def transposed():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(4, 5))
    model[1].weight = nn.Parameter(model[0].weight.detach().T)  # tied, and not contiguous
    return model


def views():
    """Return a model whose buffers are parts of one tensor, which is no weight itself."""
    model, memory = nn.Linear(2, 2), torch.arange(12.0)
    model.register_buffer("first", memory[:6])
    model.register_buffer("last", memory[6:].view(2, 3).T)
    return model


def window():
    """Return a model one of whose buffers is a part of another."""
    model = nn.Linear(2, 2)
    model.register_buffer("all", torch.arange(12.0))
    model.register_buffer("some", model.all[2:5])
    return model


MODELS = {
    "tied": Language,
    "transposed": transposed,
    "views": views,
    "window": window,
    "bf16": lambda: Language().bfloat16(),
    "float64": lambda: Language().double(),
    "complex": lambda: nn.Linear(2, 2, dtype=torch.complex64),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "compiled": lambda: torch.compile(Language()),
    "one part compiled": lambda: nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2)),
    "empty": lambda: nn.Sequential(nn.Linear(2, 2), nn.Embedding(0, 4)),
}


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
    config = TrainConfig(export=path)
    check_exportable(config, model)
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


def test_tied_weights_are_written_once(tmp_path):
    path = str(tmp_path / "model.safetensors")
    export_weights(path, Language())
    names = safetensors.load_file(path).keys()
    assert "embedding.weight" in names
    assert "head.weight" not in names
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}


def complex128():
    return nn.Linear(2, 2, dtype=torch.complex128)


def sparse():
    model = nn.Linear(2, 2)
    model.register_buffer("adjacent", torch.eye(2).to_sparse())
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (complex128, "complex128"),
        (sparse, "sparse"),
    ],
)
def test_a_model_that_does_not_fit_the_format_is_rejected_before_training(make, message):
    with pytest.raises(
        UserError, match=f"--export m.safetensors: a .*cannot hold.*{message}"
    ) as caught:
        check_exportable(TrainConfig(export="m.safetensors"), make())
    assert "\n" not in str(caught.value)
    check_exportable(TrainConfig(), make())


@pytest.fixture
def alone(monkeypatch):
    """A world of one rank, without MPI."""
    monkeypatch.setattr("kaitian_mpi.mpi.exchange.gather_values", lambda comm, value: [value])
    return SimpleNamespace(rank=0, comm=None)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("folder.safetensors", "Is a directory; name a file"),
        ("nowhere/m.safetensors", "No such file or directory; name a file in a folder"),
        ("file/m.safetensors", "Not a directory; name a file in a folder"),
        (f"{'m' * 300}.safetensors", "File name too long; name a file"),
    ],
)
def test_a_file_that_cannot_be_written_is_rejected_before_training(tmp_path, alone, path, why):
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=f"^--export .*: .*{why}") as caught:
        check_export(TrainConfig(export=str(tmp_path / path)), alone)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_in_the_run_folder_may_be_named_before_there_is_one(tmp_path, alone):
    run = tmp_path / "run"
    check_export(TrainConfig(run_dir=str(run), export=str(run / "m.safetensors")), alone)
    assert not run.exists()


@pytest.mark.parametrize("path", ["model.pt", "model", "safetensors", ".safetensors", "a.bin"])
def test_other_formats_are_rejected(path):
    with pytest.raises(UserError, match=rf"--export must be .* \*\.safetensors, not '{path}'"):
        TrainConfig(export=path)


def test_a_missing_package_is_named_with_what_to_install(tmp_path, alone, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(UserError, match=r"safetensors is not installed; pip install 'kaitian"):
        check_export(TrainConfig(export=str(tmp_path / "m.safetensors")), alone)


def test_a_full_disk_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_text("earlier")

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)  # as some file systems report it
    with pytest.raises(StorageError, match=r"could not be written: No space left .* needed, "):
        export_weights(str(path), nn.Linear(2, 2))
    assert path.read_text() == "earlier"
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_symbolic_link_stays_and_a_missing_folder_is_made(tmp_path):
    link, target = tmp_path / "link.safetensors", tmp_path / "elsewhere/model.safetensors"
    link.symlink_to(target)
    weight_files.export_weights(str(link), nn.Linear(2, 2))
    assert link.is_symlink()
    assert sorted(safetensors.load_file(target)) == ["bias", "weight"]
