"""The recipes for datasets of torchvision and of Hugging Face, and those of the page."""

import re
import sys
import types
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional
from torch.utils.data import TensorDataset

from kaitian_mpi import Task
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.recipes.datasets import load_data

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/your-own-data.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
CLASSES = ["healthy", "rust", "spot"]


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(ROOT)


@pytest.fixture
def rows():
    pictures = [Image.new(mode, (20 + number, 30), "white") for number, mode in enumerate("LP")]
    columns = {"image": datasets.Image(), "labels": datasets.ClassLabel(names=CLASSES)}
    content = {"image": pictures, "labels": [2, 0]}
    return datasets.Dataset.from_dict(content, features=datasets.Features(columns))


def load(function):
    source = load_data(TrainConfig(dataset=f"examples.own_data:{function}", data_dir="folder"))
    assert not source.to_count
    return source


def test_rows_of_hugging_face_are_pairs(rows, monkeypatch):
    parts = {"train": rows, "validation": rows}
    monkeypatch.setattr(datasets, "load_dataset", lambda name: parts)
    source = load("beans")
    inputs, labels = source.train[[0, 1]]
    assert source.num_classes == len(CLASSES)
    assert labels.tolist() == [2, 0]
    assert inputs.shape == (2, 3, 64, 64)
    assert (inputs == (1 - 0.5) / 0.25).all()
    names = {"torch": torch, "np": np}
    exec(BLOCKS[1], names)
    shown = names["Rows"](rows)
    assert (len(shown), shown.num_classes, shown[1][1]) == (2, len(CLASSES), 0)
    assert (shown[0][0] == torch.ones(3, 64, 64)).all()


def test_datasets_of_torchvision_are_given_their_folder_and_transform(monkeypatch):
    """With a stand-in: torchvision's builds belong to one build of torch each."""
    made = []

    def flowers(folder, split, transform):
        made.append((folder, split, transform))
        return TensorDataset(torch.zeros(4, 3, 8, 8), torch.arange(4))

    stand_in = types.ModuleType("torchvision")
    stand_in.datasets = types.SimpleNamespace(Flowers102=flowers)
    names = "Compose", "Resize", "CenterCrop", "ToTensor", "Normalize"
    called = {name: lambda *given, name=name: (name, *given) for name in names}
    stand_in.transforms = types.SimpleNamespace(**called)
    monkeypatch.setitem(sys.modules, "torchvision", stand_in)
    assert load("flowers").num_classes == 4
    page = {"datasets": stand_in.datasets, "transforms": stand_in.transforms}
    exec(BLOCKS[0], page)
    page["flowers"]("folder")
    assert [split for _, split, _ in made] == ["train", "val"] * 2
    for folder, _, (name, steps) in made:
        assert (folder, name) == ("folder", "Compose")
        assert steps[:3] == [("Resize", 64), ("CenterCrop", 64), ("ToTensor",)]


def test_the_pages_task_computes_a_loss():
    names = {}
    exec(BLOCKS[2], names)
    task = names["build"](hidden=4)
    assert isinstance(task, Task)
    batch = [torch.ones(3, 6), torch.zeros(3, 1)]
    assert task.loss(task.model, batch) == functional.mse_loss(task.model(batch[0]), batch[1])
    assert (len(task.data), len(task.validation)) == (400, 100)
