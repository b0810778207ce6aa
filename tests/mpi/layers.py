"""The layers of the models that tests of layouts train."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kaitian_mpi import Experts


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Splits(nn.Module):
    """Returns a tuple, a list or a dict, with a tensor that has no gradient and a number."""

    def __init__(self, width: int, form: str) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(width, 2 * width), form

    def forward(self, x: torch.Tensor) -> Any:
        one, other = self.linear(x).chunk(2, -1)
        rest = [x.detach().abs(), 0.5]
        return {"a": one, "b": other, "rest": rest} if self.form == "dict" else (one, other, rest)


class Joins(nn.Module):
    """Uses what `Splits` returns, and changes some of it in place."""

    def forward(self, parts: Any) -> torch.Tensor:
        one, other, (scale, number) = parts.values() if isinstance(parts, dict) else parts
        one = one.clone() if one._is_view() else one  # torch forbids changes of a chunk
        one *= torch.sigmoid(other)
        return one + number * torch.tanh(scale)


class Adds(nn.Module):
    """Changes in place what it gets."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width) / 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.bias
        return x


class Gated(nn.Module):
    """Has functions of two parameters, a parameter without dimensions and one without rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(width, width) / width)
        self.b = nn.Parameter(torch.randn(width, width) / width)
        self.scale, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * torch.tanh(x @ self.a) @ (self.a * self.b) + self.empty.sum()


class Offers(nn.Module):
    """Returns what the next layer uses, and what it does not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        return self.unused(x), self.used(x)


class Takes(nn.Module):
    def forward(self, parts: Any) -> torch.Tensor:
        return torch.tanh(parts[1])


class Sometimes(nn.Module):
    """Offers what the next layer uses only for some samples: perhaps of no micro-batch, or one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rare = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        return x, self.rare(x)


class Chooses(nn.Module):
    def forward(self, parts: Any) -> torch.Tensor:
        x, rare = parts
        is_rare = x.detach().sum(1, keepdim=True) > x.size(1) ** 0.5
        return torch.where(is_rare, rare, x) if is_rare.any() else x


class Tied(nn.Module):
    """Uses the weight of another layer, the other way."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.other.weight)


class Scales(nn.Module):
    """The smallest expert."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Mixes(nn.Module):
    """Adds what a mixture of experts computes."""

    def __init__(self, mixture: Experts) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixture(x)


def make_mixture(rng: random.Random, width: int, gates: dict[int, nn.Linear]) -> nn.Module:
    """Return a random mixture of experts; some share a gate of `gates`, by the number of experts.

    Its experts are unlike, some have no parameters, and one may be such that no token chooses it.
    Some mixtures are computed again in backward.
    """
    count = rng.choice([1, 2, 3, 4, 6])
    kinds = ["linear", "linear", "residual", "gated", "scales", "none"]
    experts: list[nn.Module] = []
    for kind in rng.choices(kinds, k=count):
        if kind == "linear":
            experts.append(nn.Sequential(nn.Linear(width, width), nn.Tanh()))
        elif kind == "residual":
            experts.append(Residual(width))
        elif kind == "gated":
            experts.append(Gated(width))
        elif kind == "scales":
            experts.append(Scales(width))
        else:
            experts.append(nn.Tanh())
    gate = nn.Linear(width, count, bias=rng.random() < 0.5)
    if count in gates and rng.random() < 0.5:
        gate = gates[count]
    elif gate.bias is not None and count > 2 and rng.random() < 0.5:
        with torch.no_grad():
            gate.bias[rng.randrange(count)] -= 100
    gates[count] = gate
    top_k = min(count, rng.choice([1, 2, 2]))
    mixture = Experts(experts, gate, top_k, normalize=rng.choice([None, None, True, False]))
    layer = Mixes(mixture) if rng.random() < 0.6 else mixture
    return ComputedAgain(layer) if rng.random() < 0.2 else layer


class Idle(nn.Module):
    """Returns what it gets; no loss depends on its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Attends(nn.Module):
    """Has a parameter of its own, and uses another module's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.attend = nn.MultiheadAttention(width, 2, bias=False, batch_first=True)
        self.up, self.down = nn.Linear(width, 30), nn.Linear(30, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(x * self.gain, x, x, need_weights=False)[0]
        return x + self.down(self.up(x).relu_())


class ComputedAgain(nn.Module):
    """Computes a layer again in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


class Pair(nn.Module):
    """Makes two places of a sample.

    With one place, or a bias, attention has gradients of zero, by which AdamW steps at random.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.stack([x, x.flip(1)], 1))


class FirstPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0]


def transformer(has_experts: bool = False) -> nn.Sequential:
    """Return a model for `Points`, with whatever a layout may stumble over, in float64.

    Its last weight is tied to its first; one block is used twice, one is computed again in
    backward; one layer is frozen, and one parameter is of no use. If it `has_experts`, one is
    frozen, and each is chosen by some of the samples.
    """
    torch.manual_seed(5)
    first, block = Pair(16), Attends(16)
    mixtures: list[nn.Module] = []
    if has_experts:
        experts = [nn.Linear(16, 16), Residual(16), Scales(16), Residual(16).requires_grad_(False)]
        top_1 = Experts([Residual(16), nn.Linear(16, 16)], nn.Linear(16, 2, bias=False), top_k=1)
        mixtures = [Mixes(Experts(experts, nn.Linear(16, 4))), Mixes(top_1)]
    layers = [
        first,
        block,
        *mixtures,
        ComputedAgain(Attends(16)),
        block,
        nn.Linear(16, 16).requires_grad_(False),
        Idle(),
        FirstPlace(),
        Tied(first.linear),
        nn.Linear(3, 4),
    ]
    return nn.Sequential(*layers).double()
