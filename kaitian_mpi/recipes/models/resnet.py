"""ResNet-18 for small images (He et al., 2015, arXiv 1512.03385)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

_STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))  # channels, stride of the first block
_BLOCKS_PER_STAGE = 2


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (figure 2 of the paper)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[N, inputs, H, W]`` to ``[N, outputs, H / stride, W / stride]``."""
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 with a 3x3 stem and no max pooling, as is usual for 32x32 images.

    It has 11,173,962 parameters for 3 input channels and 10 classes.
    """

    def __init__(self, num_classes: int, in_channels: int = 3) -> None:
        super().__init__()
        channels = _STAGES[0][0]
        layers: list[nn.Module] = [
            nn.Conv2d(in_channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        ]
        for outputs, first_stride in _STAGES:
            for block in range(_BLOCKS_PER_STAGE):
                layers.append(BasicBlock(channels, outputs, first_stride if block == 0 else 1))
                channels = outputs
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images ``[N, C, H, W]`` to logits ``[N, num_classes]``."""
        return self.classifier(self.features(x).mean((2, 3)))
