import pytest
import torch
from mistakes import one_line_error

from kaitian_mpi.recipes.models import MODELS, build_model

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
