"""Your own model for `kaitian-train`.

    mpirun -np 4 kaitian-train --model examples.own_model:build

`build` is called with `num_classes=`; torchvision's and timm's constructors can be named the same
way, such as `--model torchvision.models:resnet50`.
"""

from torch import nn


def build(num_classes: int) -> nn.Module:
    """Return a small network for 3x32x32 images."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )
