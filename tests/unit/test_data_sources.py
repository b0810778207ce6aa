"""load_data: built-in datasets, users' factories, and their errors."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import sklearn.datasets
import torch

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.datasets import bundled
from kaitian_mpi.recipes.datasets.images import Augmented, ImageArrays, shuffled_split
from kaitian_mpi.recipes.datasets.sources import DataSource, load_data


@pytest.mark.parametrize(("name", "total"), [("digits", 1797), ("synthetic", 2048)])
def test_built_in_data(name: str, total: int) -> None:
    if name == "digits":
        pytest.importorskip("sklearn")
    source = load_data(TrainConfig(dataset=name, augment="none"))
    assert isinstance(source.train, ImageArrays)
    assert isinstance(source.validation, ImageArrays)
    assert (source.name, source.num_classes) == (name, 10)
    assert len(source.train) + len(source.validation) == total
    assert len(source.validation) == round(total * 0.2)
    inputs, labels = source.train[list(range(len(source.train)))]
    assert inputs.shape[1:] == (3, 32, 32)
    assert source.train.images.dtype == torch.uint8
    assert labels.unique().tolist() == list(range(10))
    assert abs(float(inputs.mean())) < 0.2
    assert abs(float(inputs.std()) - 1) < 0.2
    other_seed = load_data(TrainConfig(dataset=name, augment="none", seed=7))
    assert isinstance(other_seed.validation, ImageArrays)
    assert torch.equal(other_seed.validation.images, source.validation.images)


def test_synthetic_data_can_be_learned() -> None:
    source = load_data(TrainConfig(dataset="synthetic"))
    inputs, labels = source.train[list(range(1000))]
    means = torch.stack([inputs[labels == label].mean(0).flatten() for label in range(10)])
    held_out, wanted = source.validation[list(range(400))]
    guesses = torch.cdist(held_out.flatten(1), means).argmin(1)
    assert float((guesses == wanted).float().mean()) > 0.95


def test_digits_come_from_scikit_learn() -> None:
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    read = bundled.read_digits()
    assert (read[:, :-1] == images).all()
    assert (read[:, -1] == labels).all()


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        bundled.load_digits(0.2)
    assert str(caught.value) == (
        'the digits dataset needs scikit-learn: pip install "kaitian-mpi[demo]"'
    )


@pytest.mark.parametrize(
    ("dataset", "augment", "kind"),
    [
        ("digits", "auto", "crop"),
        ("digits", "none", None),
        ("digits", "crop-flip", "crop-flip"),
        ("synthetic", "auto", None),
        ("synthetic", "crop", "crop"),
    ],
)
def test_augmentation(dataset: str, augment: str, kind: str | None) -> None:
    if dataset == "digits":
        pytest.importorskip("sklearn")
    source = load_data(TrainConfig(dataset=dataset, augment=augment))
    assert getattr(source.train, "kind", None) == kind
    assert isinstance(source.validation, ImageArrays)
    if kind is not None:
        assert isinstance(source.train, Augmented)


def test_held_out_samples() -> None:
    for length, fraction, count in (
        (50_000, 0.2, 10_000),
        (2, 0.01, 1),
        (2, 0.99, 1),
        (10, 0.25, 2),
    ):
        train, validation = shuffled_split(length, fraction)
        assert len(validation) == count
        assert sorted([*train.tolist(), *validation.tolist()]) == list(range(length))
    with pytest.raises(UserError, match="1 training samples are too few"):
        shuffled_split(1, 0.5)


def test_unknown_name() -> None:
    with pytest.raises(UserError, match="no dataset 'imagenet'; give digits, cifar"):
        load_data(TrainConfig(dataset="imagenet"))


FACTORIES = """
import sklearn.datasets
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

class Pairs(Dataset):
    def __init__(self, length, label=lambda index: index % 4):
        self.length, self.label = length, label
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        return torch.full((2, 3), float(index)), self.label(index)

class Named(Pairs):
    num_classes = 9

class WithClasses(Pairs):
    classes = ["cat", "dog", "eel", "fox", "gnu", "hen"]

class WithTargets(Pairs):
    targets = [0, 1, 6]

class BadLater(Pairs):
    def __getitem__(self, index):
        if index > 1:
            raise OSError("disk gone")
        return super().__getitem__(index)

class Stream(IterableDataset):
    def __iter__(self):
        yield from ()

def one(): return Pairs(10)
def two(): return Pairs(10), Pairs(6, lambda index: 4)
def named(): return Named(10)
def with_classes(): return WithClasses(10)
def with_targets(): return WithTargets(10)
def tensors(): return TensorDataset(torch.zeros(8, 5), torch.arange(8, dtype=torch.int32))
def in_folder(data_dir): return Pairs(len(data_dir))
def in_optional_folder(data_dir="12345"): return Pairs(len(data_dir))

def raises(): raise OSError("no\\nfile")
def needs_more(size): return Pairs(size)
def three(): return one(), one(), one()
def empty(): return Pairs(0)
def stream(): return Stream()
def images(): return [("picture.png", 0)] * 4
def one_element_labels(): return [(torch.zeros(2), torch.tensor([1]))] * 4
def first_fails(): return BadLater(4).__class__(4, {}.__getitem__)
def bad_later(): return BadLater(4)
number = 5
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_data.py").write_text(FACTORIES)
    (tmp_path / "my_broken.py").write_text("1 / 0\n")
    (tmp_path / "my_importer.py").write_text("import no_such_package\n")
    for name in ("my_data", "my_broken", "my_importer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def load(name: str, **settings: str) -> DataSource:
    return load_data(TrainConfig(dataset=f"my_data:{name}", **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "settings", "train", "validation", "classes"),
    [
        ("one", {}, 8, 2, 4),
        ("two", {}, 10, 6, 5),
        ("named", {}, 8, 2, 9),
        ("with_classes", {}, 8, 2, 6),
        ("with_targets", {}, 8, 2, 7),
        ("tensors", {}, 6, 2, 8),
        ("one", {"data_dir": "ignored"}, 8, 2, 4),
        ("in_folder", {"data_dir": "0123456789"}, 8, 2, 4),
        ("in_optional_folder", {"data_dir": "0123456789"}, 8, 2, 4),
    ],
)
def test_factories(
    here: Path, name: str, settings: dict[str, str], train: int, validation: int, classes: int
) -> None:
    source = load(name, **settings)
    sizes = len(source.train), len(source.validation)  # type: ignore[arg-type]
    assert (*sizes, source.num_classes) == (train, validation, classes)
    inputs, labels = source.train[[0, 1]]
    assert len(inputs) == len(labels) == 2
    assert labels.dtype == torch.int64


def test_a_single_data_set_is_split_without_overlap(here: Path) -> None:
    source = load("one")
    values = [
        int(inputs[0, 0])
        for part in (source.train, source.validation)
        for inputs in part[list(range(len(part)))][0]  # type: ignore[arg-type]
    ]
    assert sorted(values) == list(range(10))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my_data:", "'my_data:' is not module:factory"),
        ("no_module_here:make", "no module named 'no_module_here', neither installed nor in "),
        ("my_broken:make", "importing my_broken raised ZeroDivisionError: division by zero"),
        (
            "my_importer:make",
            "importing my_importer raised ModuleNotFoundError: No module named 'no_such_package'",
        ),
        ("my_data:absent", "module my_data has no attribute 'absent'"),
        ("my_data:number", "is an object of type int; name a function or a class"),
        ("my_data:raises", "the factory raised OSError: no file"),
        ("my_data:needs_more", "the factory raised TypeError: needs_more() missing 1 required"),
        ("my_data:in_folder", "the factory requires data_dir; give --data-dir"),
        ("my_data:three", "it returned a tuple of 3; the factory must return (train, validation)"),
        ("my_data:empty", "the dataset has no samples"),
        ("my_data:stream", "it returned a Stream"),
        ("my_data:images", "no such pair: "),
        ("my_data:one_element_labels", "no such pair: "),
        ("my_data:first_fails", "reading its first sample raised KeyError: 0"),
        ("my_data:bad_later", "counting its classes raised OSError: disk gone"),
    ],
)
def test_invalid_factories(here: Path, spec: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_data(TrainConfig(dataset=spec))
    text = str(caught.value)
    assert text.startswith("--dataset")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize("augment", ["crop", "crop-flip"])
def test_factories_do_their_own_augmentation(here: Path, augment: str) -> None:
    with pytest.raises(UserError, match=f"--augment {augment} works .* not with --dataset my_data"):
        load("one", augment=augment)
    assert load("one", augment="none").num_classes == 4
