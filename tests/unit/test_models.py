"""The built-in models, users' own, the smallest batch of a model, and `--task module:function`."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from mistakes import one_line_error
from torch import nn
from torch.utils.data import TensorDataset

from kaitian_mpi.cli.flags import parse_config
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.data_source import DataSource
from kaitian_mpi.recipes.image_classification import check_inputs, classify
from kaitian_mpi.recipes.models import MODELS, build_model
from kaitian_mpi.recipes.user_data import batches_of_pairs
from kaitian_mpi.recipes.user_task import build_task
from kaitian_mpi.train.layouts.pipeline.chain import ModelCall, chain_of, run
from kaitian_mpi.train.measure.plan import copied_model, min_batch_of
from kaitian_mpi.train.task import Computation, Task

COUNTS = {"mobilenetv2": 2_236_682, "resnet18": 11_173_962, "cnn": 24_346}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_maps_images_to_classes_and_learns(name):
    model = build_model(name, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[name]
    images = torch.randn(2, 3, 32, 32)
    logits = model(images)
    assert logits.shape == (2, 10)
    layers = chain_of(classify(TrainConfig(), model, DataSource([0], [0], 10)))
    model.eval()
    assert torch.equal(run(layers, ModelCall((images,), {}), None), model(images))
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    if name == "mobilenetv2":  # keeps the resolution that small images need
        assert model.features(torch.randn(1, 3, 32, 32)).shape[2:] == (4, 4)


@pytest.mark.parametrize(
    ("factory", "fault"),
    [
        ("lambda num_classes: nn.Linear(3, num_classes)", ""),
        ("lambda num_classes: 'a model'", r"returned a str; it must return a torch\.nn\.Module"),
        ("lambda: None", "num_classes=.* an unexpected keyword argument 'num_classes'"),
        ("lambda classes: None", "num_classes=.*missing a required argument: 'classes'"),
        ("lambda num_classes, width: None", "num_classes=.*missing a required argument: 'width'"),
    ],
)
def test_a_users_factory(tmp_path, monkeypatch, factory, fault):
    name = f"own{abs(hash(factory))}"
    (tmp_path / f"{name}.py").write_text(f"from torch import nn\nbuild = {factory}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    if not fault:
        assert build_model(f"{name}:build", 5).out_features == 5
        return
    with one_line_error(fault):
        build_model(f"{name}:build", 5)


class Standardised(nn.Module):
    """Divides by the batch's standard deviation, which is NaN for one sample."""

    def forward(self, x):
        flat = x.flatten(1)
        return flat / (1 + flat.std(0))


class Dropping(nn.Module):
    """Changes a buffer and an attribute in each forward, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(48), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen += len(x)
        return nn.functional.dropout(self.norm(x.flatten(1)))


class Late(torch.Tensor):
    """A result whose computation failed, which a device reports only when it is read."""

    def isfinite(self):
        raise RuntimeError("device-side assert triggered")


class FailingForOne(nn.Module):
    def forward(self, x):
        return x.sum().as_subclass(Late) if len(x) == 1 else x.sum()


class Uncopied(nn.Module):
    def __deepcopy__(self, _):
        raise RuntimeError("cannot be copied")


DATA = batches_of_pairs(TensorDataset(torch.randn(5, 3, 4, 4), torch.zeros(5, dtype=torch.int64)))
HOST = Computation(torch.device("cpu"), "fp32", "contiguous")


def task_of(model, factor=1.0):
    return SimpleNamespace(
        model=model,
        loss=lambda model, batch: model(batch[0]).sum() / factor * factor,
        weight_of=lambda batch, samples: samples * factor,
    )


def min_batch(task):
    return min_batch_of(task, DATA, HOST, partial(copied_model, task.model, HOST.device))


def flat(*layers):
    return nn.Sequential(nn.Flatten(), *layers)


class Scaling(nn.Module):
    def forward(self, x):
        return x.float() / 255


def test_bytes_are_for_models_that_convert_them():
    config = TrainConfig(dataset="my:data", model="my:model")
    layer = nn.Linear(4, 2)
    for dtype in (torch.uint8, torch.float32):
        data = batches_of_pairs(TensorDataset(torch.zeros(3, 4, dtype=dtype), torch.arange(3)))
        check_inputs(config, nn.Sequential(Scaling(), layer), source := DataSource(data, data, 3))
    check_inputs(config, layer, source)
    bytes_ = batches_of_pairs(TensorDataset(torch.zeros(3, 4, dtype=torch.uint8), torch.arange(3)))
    with one_line_error("--dataset my:data: its inputs are uint8, with which --model my:model can"):
        check_inputs(config, layer, DataSource(bytes_, bytes_, 3))


@pytest.mark.filterwarnings("ignore:std")
def test_min_batch_is_found_by_trial():
    for model, expected in (
        (flat(nn.Linear(48, 3)), 1),
        (flat(nn.Linear(48, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), 2),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), 1),
        (nn.Sequential(nn.Conv2d(3, 4, 4), nn.BatchNorm2d(4)), 2),  # a single value is left
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4)), 1),
        (flat(nn.LayerNorm(48)), 1),
        (Standardised(), 2),
        (nn.Module(), 1),  # which has no forward
        (FailingForOne(), 2),
        (Uncopied(), 1),
        (flat(nn.LazyLinear(3)), 1),
        (build_model("cnn", 3), 1),
    ):
        assert min_batch(task_of(model)) == expected


def test_the_model_and_the_generators_are_restored():
    model = Dropping().eval()
    before = torch.get_rng_state()
    assert min_batch(task_of(model)) == 2
    assert torch.equal(torch.get_rng_state(), before)
    assert (model.calls, model.seen.item(), model.training) == (0, 0, False)
    assert model.norm.num_batches_tracked.item() == 0


def test_a_mean_of_nothing_is_allowed():
    assert min_batch(task_of(flat(nn.Linear(48, 3)), 0.0)) == 1


FUNCTIONS = """
import torch
from kaitian_mpi import Task
def task(width=4, loss=lambda model, batch: model(batch).mean(), **more):
    model = torch.nn.Linear(2, width)
    return Task(model=model, data=torch.ones(8, 2), loss=loss,
                optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), **more)
def build(width, *, name="mine"): return task(width, name=name)
def anything(**settings): return task(**settings)
def nothing(): return None
def without_parameters(): return task()
def open_form(): return task(loss=None)
def two_losses(): return task(parity_loss=lambda model, batch: model(batch).mean())
def raises(): raise OSError("no\\nfile")
def wrong(): return Task(model=3, data=[1], optimizer=None)
def positional(width, /): return task(width)
number = 5
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tasks.py").write_text(FUNCTIONS)
    monkeypatch.delitem(sys.modules, "my_tasks", raising=False)
    return tmp_path


def build(function, seed=0, **settings):
    return build_task(f"my_tasks:{function}", settings, seed)


def parse(*arguments):
    return parse_config("kaitian-train", arguments)


def test_a_task_gets_the_settings_and_the_seed():
    task = build("build", width=3, name="narrow")
    assert isinstance(task, Task)
    assert (task.model.out_features, task.name) == (3, "narrow")
    assert build("anything", width=5).model.out_features == 5
    first, again, other = (build("task", seed).model.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    config = parse("--task", "package.module:build")
    assert config.choose_folder().name.startswith("package.module-build-2")
    assert config.memory_format == "contiguous"
    for words in (["--task", "a:b", "--memory-format", "auto"], []):
        assert parse(*words).memory_format == "auto"


def test_a_function_that_makes_no_task_is_named():
    for name, settings, message in (
        ("build", {}, r"--set do not fit: missing a required argument: 'width'; it takes width, "),
        ("build", {"width": 1, "nam": 2}, r"argument 'nam'; it takes width, name"),
        ("without_parameters", {"x": 1}, r"argument 'x'; it takes none"),
        ("positional", {"width": 1}, r"the values of --set do not fit: .*'width'"),
        ("nothing", {}, r"the function returned a NoneType; it must return a kaitian_mpi"),
        ("open_form", {}, r"the Task has no loss; give Task\(loss=\.\.\.\)"),
        ("two_losses", {}, r"Task: leave out parity_loss"),
        ("raises", {}, r"--task my_tasks:raises: raised OSError: no file; --log-level"),
        ("wrong", {}, r"Task: model must be a torch.nn.Module, not a int"),
        ("number", {}, r"is an object of type int; name a function"),
        ("absent", {}, r"module my_tasks has no attribute 'absent'"),
    ):
        with one_line_error(message):
            build(name, **settings)


def test_values_of_set_are_read_as_in_a_file():
    dates = {"2024-01-01": "2024-01-01", "[2024-01-01]": "[2024-01-01]"}  # not for config.json
    values = {"3": 3, "3e-4": 3e-4, "true": True, '"3"': "3", "[1, 2]": [1, 2], "": ""}
    texts = {"adam": "adam", "a=b": "a=b", "1\nlr = 2": "1\nlr = 2"}
    for text, value in (values | texts | dates).items():
        config = parse("--task", "a:b", "--set", f"key={text}", "--set", "other=1")
        assert config.set == {"key": value, "other": 1}
        assert type(config.set["key"]) is type(value)
    with pytest.raises(UserError, match=r"--set width is ambiguous.* set\.width = \.\.\."):
        build_task("my_tasks:build", {"width": 3}, 0, ["width"])  # a setting, and an argument
