"""A small convolutional network for quick experiments."""

from __future__ import annotations

import torch
from torch import nn

_CHANNELS = (16, 32, 64)


class SmallCNN(nn.Module):
    """Three convolutions with batch norm and pooling, then a linear layer."""

    def __init__(self, num_classes: int, in_channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for outputs in _CHANNELS:
            layers += [
                nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            ]
            channels = outputs
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images ``[N, C, H, W]`` to logits ``[N, num_classes]``."""
        return self.classifier(self.features(x).mean((2, 3)))
