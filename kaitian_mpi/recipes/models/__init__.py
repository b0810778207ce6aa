"""The models for `--model`: built in, or from a user's factory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from kaitian_mpi.config.factory import load_factory
from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.models.cnn import SmallCNN
from kaitian_mpi.recipes.models.mobilenetv2 import MobileNetV2
from kaitian_mpi.recipes.models.resnet import ResNet18

MODELS: dict[str, Callable[[int], nn.Module]] = {
    "mobilenetv2": MobileNetV2,
    "resnet18": ResNet18,
    "cnn": SmallCNN,
}


def build_model(name: str, num_classes: int) -> nn.Module:
    """Build the model of the given name, or the one that `module:factory` returns.

    A factory is called with `num_classes=` and returns a `torch.nn.Module`, as the constructors of
    torchvision's models do.

    Raises:
        UserError: there is no such model, or the factory does not return a module.
    """
    if ":" not in name:
        if name not in MODELS:
            raise UserError(
                f"--model: there is no model {name!r}; give {', '.join(MODELS)} or module:factory"
            )
        return MODELS[name](num_classes)
    factory = load_factory("--model", name)
    _check_takes_classes(name, factory)
    model = factory(num_classes=num_classes)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"--model {name}: the factory returned a {type(model).__name__}; it must return a "
            "torch.nn.Module"
        )
    return model


def _check_takes_classes(name: str, factory: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    try:
        signature.bind(num_classes=0)
    except TypeError as error:
        raise UserError(
            f"--model {name}: cannot be called with num_classes=... alone ({error}): its "
            f"parameters are {signature}; add num_classes and give the others defaults"
        ) from error
