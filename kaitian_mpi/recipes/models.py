"""The models for `--model`: built in, for 32x32 images, or from a user's factory."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from kaitian_mpi.config.factory import load_factory, parameters_of
from kaitian_mpi.errors import UserError

_RESNET_STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))  # channels, stride of the first block
# (expansion, output channels, repeats, stride of the first repeat): table 2 of the paper,
# with the strides of the first two stages set to 1 so that a 32x32 image ends at 4x4.
_MOBILENET_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_STEM_CHANNELS = 32
_HEAD_CHANNELS = 1280


class PixelMean(nn.Module):
    """The mean of each channel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[N, C, H, W]`` to ``[N, C]``."""
        return x.mean((2, 3))


class ImageClassifier(nn.Module):
    """Features of images, their mean over the pixels, and a linear classifier."""

    def __init__(self, features: list[nn.Module], classifier: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.mean = PixelMean()
        self.classifier = classifier

    @property
    def in_order(self) -> list[nn.Module]:
        """The modules in order: each takes the output of the one before."""
        return [*self.features, self.mean, self.classifier]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images ``[N, C, H, W]`` to logits ``[N, num_classes]``."""
        return self.classifier(self.mean(self.features(x)))


def _conv_bn(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class SmallCNN(ImageClassifier):
    """Three convolutions with batch norm and pooling, then a linear layer."""

    def __init__(self, num_classes: int) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for outputs in (16, 32, 64):
            layers += [*_conv_bn(channels, outputs, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
            channels = outputs
        super().__init__(layers, nn.Linear(channels, num_classes))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (figure 2 of the paper)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first = _conv_bn(inputs, outputs, 3, stride)
        second = _conv_bn(outputs, outputs, 3)
        self.layers = nn.Sequential(*first, nn.ReLU(inplace=True), *second)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*_conv_bn(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[N, inputs, H, W]`` to ``[N, outputs, H / stride, W / stride]``."""
        return functional.relu(self.layers(x) + self.shortcut(x))


class ResNet18(ImageClassifier):
    """ResNet-18 (He et al., 2015, arXiv 1512.03385) with a 3x3 stem and no max pooling."""

    def __init__(self, num_classes: int) -> None:
        channels = 64
        layers = [*_conv_bn(3, channels, 3), nn.ReLU(inplace=True)]
        for outputs, first_stride in _RESNET_STAGES:
            for stride in (first_stride, 1):
                layers.append(BasicBlock(channels, outputs, stride))
                channels = outputs
        super().__init__(layers, nn.Linear(channels, num_classes))


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, projection; a shortcut where shapes allow (section 3.3)."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [*_conv_bn(inputs, hidden, 1), nn.ReLU6(inplace=True)]
        layers += [*_conv_bn(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6(inplace=True)]
        layers += _conv_bn(hidden, outputs, 1)
        self.layers = nn.Sequential(*layers)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[N, inputs, H, W]`` to ``[N, outputs, H / stride, W / stride]``."""
        return x + self.layers(x) if self.shortcut else self.layers(x)


class MobileNetV2(ImageClassifier):
    """MobileNetV2 (Sandler et al., 2018, arXiv 1801.04381) of width 1.0."""

    def __init__(self, num_classes: int) -> None:
        channels = _STEM_CHANNELS
        layers = [*_conv_bn(3, channels, 3), nn.ReLU6(inplace=True)]
        for expansion, outputs, repeats, first_stride in _MOBILENET_STAGES:
            for repeat in range(repeats):
                stride = first_stride if repeat == 0 else 1
                layers.append(InvertedResidual(channels, outputs, stride, expansion))
                channels = outputs
        layers += [*_conv_bn(channels, _HEAD_CHANNELS, 1), nn.ReLU6(inplace=True)]
        last = nn.Linear(_HEAD_CHANNELS, num_classes)
        super().__init__(layers, nn.Sequential(nn.Dropout(0.2), last))
        self.apply(_initialize)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.01)
        nn.init.zeros_(module.bias)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "mobilenetv2": MobileNetV2,
    "resnet18": ResNet18,
    "cnn": SmallCNN,
}


def build_model(name: str, num_classes: int) -> nn.Module:
    """Build the model of the given name, or the one that `module:factory` returns.

    A factory is called with `num_classes=` and returns a `torch.nn.Module`, as the constructors of
    torchvision's models do.
    """
    if ":" not in name:
        return MODELS[name](num_classes)
    factory = load_factory("--model", name)
    parameters = parameters_of(factory)
    if parameters is not None:
        try:
            inspect.Signature(list(parameters.values())).bind(num_classes=0)
        except TypeError as error:
            raise UserError(
                f"--model {name}: cannot be called with num_classes=... alone ({error}); add "
                "num_classes and give the other parameters defaults"
            ) from error
    model = factory(num_classes=num_classes)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"--model {name}: the factory returned a {type(model).__name__}; it must return a "
            "torch.nn.Module"
        )
    return model
