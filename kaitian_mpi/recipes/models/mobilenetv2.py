"""MobileNetV2 for small images (Sandler et al., 2018, arXiv 1801.04381)."""

from __future__ import annotations

import torch
from torch import nn

# (expansion, output channels, repeats, stride of the first repeat): table 2 of the paper,
# with the strides of the first two stages set to 1 so that a 32x32 image ends at 4x4.
_STAGES = (
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
_DROPOUT = 0.2


def _conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]


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


class MobileNetV2(nn.Module):
    """MobileNetV2 of width 1.0 with strides for 32x32 images.

    It has 2,236,682 parameters for 3 input channels and 10 classes.
    """

    def __init__(self, num_classes: int, in_channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            *_conv_bn(in_channels, _STEM_CHANNELS, 3),
            nn.ReLU6(inplace=True),
        ]
        channels = _STEM_CHANNELS
        for expansion, outputs, repeats, first_stride in _STAGES:
            for repeat in range(repeats):
                stride = first_stride if repeat == 0 else 1
                layers.append(InvertedResidual(channels, outputs, stride, expansion))
                channels = outputs
        layers += [*_conv_bn(channels, _HEAD_CHANNELS, 1), nn.ReLU6(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Dropout(_DROPOUT), nn.Linear(_HEAD_CHANNELS, num_classes)
        )
        self.apply(_initialize)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images ``[N, C, H, W]`` to logits ``[N, num_classes]``."""
        return self.classifier(self.features(x).mean((2, 3)))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.01)
        nn.init.zeros_(module.bias)
