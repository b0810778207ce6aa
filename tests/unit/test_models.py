import pytest
import torch

from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.models import MODELS, build_model


@pytest.mark.parametrize(
    ("name", "parameters"), [("mobilenetv2", 2_236_682), ("resnet18", 11_173_962), ("cnn", 24_346)]
)
def test_parameter_counts_for_ten_classes(name, parameters):
    model = build_model(name, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("name", MODELS)
def test_every_model_maps_images_to_classes_and_learns(name):
    model = build_model(name, 7)
    images = torch.randn(2, 3, 32, 32)
    logits = model(images)
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_mobilenetv2_keeps_the_resolution_that_small_images_need():
    assert build_model("mobilenetv2", 10).features(torch.randn(1, 3, 32, 32)).shape[2:] == (4, 4)


def test_a_users_model_factory(tmp_path, monkeypatch):
    (tmp_path / "ownmodel.py").write_text(
        "from torch import nn\n"
        "def build(num_classes):\n    return nn.Linear(3, num_classes)\n"
        "def wrong(num_classes):\n    return 'a model'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert build_model("ownmodel:build", 5).out_features == 5
    with pytest.raises(UserError, match=r"returned a str; it must return a torch\.nn\.Module"):
        build_model("ownmodel:wrong", 5)


@pytest.mark.parametrize(
    ("factory", "fault"),
    [
        ("lambda: None", "got an unexpected keyword argument 'num_classes'"),
        ("lambda classes: None", "missing a required argument: 'classes'"),
        ("lambda num_classes, width: None", "missing a required argument: 'width'"),
    ],
)
def test_a_factory_that_cannot_be_called_is_a_one_line_error(tmp_path, monkeypatch, factory, fault):
    name = f"own{abs(hash(factory))}"
    (tmp_path / f"{name}.py").write_text(f"build = {factory}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="cannot be called with num_classes=") as caught:
        build_model(f"{name}:build", 5)
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)
