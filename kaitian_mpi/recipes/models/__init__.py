"""The models for `--model`: built in, or from a user's factory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from kaitian_mpi.config.factory import load_factory
from kaitian_mpi.errors import UserError

# Their modules here, and their classes: only the one that is trained is imported.
MODELS = {
    "mobilenetv2": ("mobilenetv2", "MobileNetV2"),
    "resnet18": ("resnet", "ResNet18"),
    "cnn": ("cnn", "SmallCNN"),
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
        module, class_name = MODELS[name]
        built_in: nn.Module = getattr(import_module(f"{__name__}.{module}"), class_name)(
            num_classes
        )
        return built_in
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
