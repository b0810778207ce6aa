"""The built-in models, users' own, and the smallest batch that a model can train on."""

from types import SimpleNamespace

import pytest
import torch
from mistakes import one_line_error
from torch import nn
from torch.utils.data import TensorDataset

from kaitian_mpi.recipes.datasets import batches_of_pairs
from kaitian_mpi.recipes.models import MODELS, build_model
from kaitian_mpi.train.measure.plan import min_batch_of
from kaitian_mpi.train.task import Computation

COUNTS = {"mobilenetv2": 2_236_682, "resnet18": 11_173_962, "cnn": 24_346}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_maps_images_to_classes_and_learns(name):
    model = build_model(name, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[name]
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 10)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_mobilenetv2_keeps_the_resolution_that_small_images_need():
    assert build_model("mobilenetv2", 10).features(torch.randn(1, 3, 32, 32)).shape[2:] == (4, 4)


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
        weigh=lambda batch, samples: samples * factor,
    )


def flat(*layers):
    return nn.Sequential(nn.Flatten(), *layers)


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(
    ("model", "expected"),
    [
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
    ],
)
def test_min_batch_is_found_by_trial(model, expected):
    assert min_batch_of(task_of(model), DATA, HOST) == expected


def test_the_model_and_the_generators_are_restored_and_a_mean_of_nothing_is_allowed():
    model = Dropping().eval()
    before = torch.get_rng_state()
    assert min_batch_of(task_of(model), DATA, HOST) == 2
    assert torch.equal(torch.get_rng_state(), before)
    assert (model.calls, model.seen.item(), model.training) == (0, 0, False)
    assert model.norm.num_batches_tracked.item() == 0
    assert min_batch_of(task_of(flat(nn.Linear(48, 3)), 0.0), DATA, HOST) == 1
