"""load_data: built-in datasets, users' factories, and their errors."""

import functools
import importlib.util
import re
import sys

import pytest
import torch
from mistakes import one_line_error

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes import images
from kaitian_mpi.recipes.datasets import load_data
from kaitian_mpi.recipes.images import ImageArrays, shuffled_split


@pytest.mark.parametrize(("name", "total"), [("digits", 1797), ("synthetic", 2048)])
def test_built_in_data(name, total):
    if name == "digits":
        pytest.importorskip("sklearn")
    source, other = (
        load_data(TrainConfig(dataset=name, augment="none", seed=seed)) for seed in (0, 7)
    )
    assert type(source.train) is type(source.validation) is ImageArrays
    assert (source.num_classes, len(source.train) + len(source.validation)) == (10, total)
    assert len(source.validation) == round(total * 0.2)
    inputs, labels = source.train[list(range(len(source.train)))]
    assert inputs.shape[1:] == (3, 32, 32)
    assert source.train.images.dtype == torch.uint8
    assert labels.unique().tolist() == list(range(10))
    assert abs(float(inputs.mean())) < 0.2
    assert abs(float(inputs.std()) - 1) < 0.2
    assert torch.equal(other.validation.images, source.validation.images)
    usual = "crop" if name == "digits" else "none"
    for augment, kind in (("auto", usual), ("none", "none"), ("crop-flip", "crop-flip")):
        source = load_data(TrainConfig(dataset=name, augment=augment))
        assert (source.train.augment, source.validation.augment) == (kind, "none")


def test_held_out_samples():
    for length, fraction, count in ((50_000, 0.2, 10_000), (2, 0.01, 1), (2, 0.99, 1)):
        train, validation = shuffled_split(length, fraction)
        assert len(validation) == count
        assert sorted([*train.tolist(), *validation.tolist()]) == list(range(length))


def test_digits_come_from_scikit_learn(monkeypatch):
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    pixels, labels = load_digits(return_X_y=True)
    read = images.read_digits()
    assert (read[:, :-1] == pixels).all()
    assert (read[:, -1] == labels).all()
    monkeypatch.setattr(images, "read_digits", READ_ONCE.__wrapped__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'^the digits dataset needs .* "kaitian-mpi\[demo\]"$'):
        images.load_digits(0.2)


READ_ONCE = functools.cache(images.read_digits)
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
def lonely(): return Pairs(1)
def empty(): return Pairs(0)
def stream(): return Stream()
def part(): return torch.utils.data.Subset(WithTargets(10), range(5))
def joined(): return torch.utils.data.ConcatDataset([Named(3), part()])
def half_known(): return torch.utils.data.ConcatDataset([Named(3), Pairs(4)])
def known_and_not(): return Named(10), Pairs(5)
def pairs_of(inputs, target): return [(inputs, target)] * 4
def images(): return pairs_of("picture.png", 0)
def arrays(): return pairs_of(torch.zeros(2).numpy(), 0)
def one_element_labels(): return pairs_of(torch.zeros(2), torch.tensor([1]))
def one_hot(): return pairs_of(torch.zeros(2), torch.tensor([0.0, 0.0, 1.0]))
def masks(): return pairs_of(torch.zeros(2), torch.ones(5, 5, dtype=torch.int64))
def regression(): return pairs_of(torch.zeros(2), torch.tensor(0.5))
def vectors(): return pairs_of(torch.zeros(2), [0.5, 1.5])
def unequal(): return [(torch.zeros(2 + number), 0) for number in range(4)]
def names(): return pairs_of(torch.zeros(2), "cat")
def keyed(): return [{"pixel_values": torch.zeros(2), "labels": 1}] * 4
def triples(): return [(torch.zeros(2), 0, "cat.jpg")] * 4
def first_fails(): return Pairs(4, {}.__getitem__)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "read_digits", READ_ONCE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    files = {"my_data": FACTORIES, "my_broken": "1 / 0", "my_importer": "import no_such_package"}
    for name, content in files.items():
        (tmp_path / f"{name}.py").write_text(content)
        monkeypatch.delitem(sys.modules, name, raising=False)


def load(name, **settings):
    return load_data(TrainConfig(dataset=f"my_data:{name}", **settings))


def test_factories():
    """0 classes: the labels are to be read."""
    for name, settings, train, validation, classes in (
        ("one", {}, 8, 2, 0), ("one", {"augment": "none"}, 8, 2, 0), ("two", {}, 10, 6, 0),
        ("named", {}, 8, 2, 9), ("with_classes", {}, 8, 2, 6), ("with_targets", {}, 8, 2, 7),
        ("tensors", {}, 6, 2, 8), ("one", {"data_dir": "ignored"}, 8, 2, 0),
        ("part", {}, 4, 1, 7), ("joined", {}, 6, 2, 9), ("half_known", {}, 6, 1, 0),
        ("known_and_not", {}, 10, 5, 9),
        ("in_folder", {"data_dir": "0123456789"}, 8, 2, 0),
        ("in_optional_folder", {"data_dir": "0123456789"}, 8, 2, 0),
    ):  # fmt: skip
        source = load(name, **settings)
        found = len(source.train), len(source.validation), source.num_classes
        assert found == (train, validation, classes)
        # All samples are read for it, which may take long, unless the dataset has them by a name.
        unknown = {0: 1 + (name == "two"), 9: name == "known_and_not"}.get(classes, 0)
        assert len(source.to_count) == unknown
        inputs, labels = source.train[[0, 1]]
        assert len(inputs) == len(labels) == 2
        assert labels.dtype == torch.int64
        if name == "one":  # which is split without overlap
            parts = (part[list(range(len(part)))][0] for part in (source.train, source.validation))
            assert sorted(torch.cat(list(parts))[:, 0, 0].tolist()) == list(range(10))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("imagenet", "no dataset 'imagenet'; give digits, cifar"),
        ("my_data:", "'my_data:' is not module:factory"),
        ("no_module_here:make", "no module named 'no_module_here', neither installed nor in "),
        ("my_broken:make", "importing my_broken raised ZeroDivisionError: division by zero"),
        ("my_importer:make", "raised ModuleNotFoundError: No module named 'no_such_package'"),
        ("my_data:raises", "the factory raised OSError: no file"),
        ("my_data:needs_more", "the factory raised TypeError: needs_more() missing 1 required"),
        ("my_data:in_folder", "the factory requires data_dir; give --data-dir"),
        ("my_data:three", "it returned a tuple of 3; the factory must return (train, validation)"),
        ("my_data:lonely", "1 training samples are too few"),
        ("my_data:empty", "the dataset has no samples"),
        ("my_data:stream", "it returned a Stream"),
        ("my_data:images", "its inputs are of type str; convert them to tensors of one shape"),
        ("my_data:arrays", "its inputs are of type numpy.ndarray; convert them to tensors of one"),
        ("my_data:one_element_labels", "its targets are tensors of shape [1]; return one class "),
        ("my_data:one_hot", "its targets are one-hot; return the class, such as int(target.argm"),
        ("my_data:masks", "its targets are tensors of shape [5, 5]; return one class for each sam"),
        ("my_data:regression", "its targets are floating-point numbers, as for regression, and it"),
        ("my_data:vectors", "its targets are floating-point numbers, as for regression, and it"),
        (
            "my_data:names",
            "its targets are of type str; return the class as an int, or give a",
        ),
        (
            "my_data:unequal",
            "different shapes, [2] and [3]: resize or pad them in the dataset, or ",
        ),
        ("my_data:keyed", "its samples have keys ('pixel_values', 'labels'); return (input ten"),
        ("my_data:triples", "no such pair: "),
        ("my_data:first_fails", "reading sample 0 raised KeyError: 0"),
    ],
)
def test_invalid_factories(spec, message):
    with one_line_error(f"{re.escape(message)}") as caught:
        load_data(TrainConfig(dataset=spec))
    if message.startswith(("its ", "no such pair")):
        assert "give a Task with a loss of your own (--task)" in str(caught.value)
    for augment in ("crop", "crop-flip"):  # is the factory's own
        with pytest.raises(UserError, match=f"--augment {augment} works .* not with --dataset my"):
            load("one", augment=augment)
