"""How an outcome differs from the reference, and how much of that rounding may explain. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kaitian_mpi.train.measure.outcome import Outcome

LOSS, OUTPUTS = "the loss", "the outputs"
NORM, DIRECTION = "the gradient's norm", "the gradient's direction"
# In any case a gradient or a buffer may differ by this much: a single rounding may switch a ReLU.
_KINK = 0.05
_UNITS_OF_RESULT = 32.0
_UNITS_OF_ZERO = 8.0
_NOISE_FACTOR = 4.0  # how much more than small changes of weights and data rounding may do
_MAX_NORM_CHANGE = 0.9  # so that a gradient of zero is never taken for rounding
_TINY = 1e-300


@dataclass(frozen=True)
class Difference:
    """How a quantity differs from the reference."""

    name: str
    relative: float
    """NaN if it is not finite."""
    allowed: float
    """The relative difference that rounding may explain."""
    most_in: str = ""
    """The parameters whose gradients differ most."""

    @property
    def excess(self) -> float:
        """The difference by the allowed one: above 1, it is not rounding."""
        return self.relative / self.allowed if math.isfinite(self.relative) else math.inf

    def __str__(self) -> str:
        """Return both, such as `the loss 1.2e+00 (allowed 3.1e-05)`."""
        where = f", most in {self.most_in}" if self.most_in and self.excess > 1 else ""
        return f"{self.name} {self.relative:.1e} (allowed {self.allowed:.1e}{where})"


def distances(own: Outcome, reference: Outcome, unit: float) -> dict[str, float]:
    """Return how much an outcome differs from the reference, by quantity; NaN where it is NaN.

    Args:
        own: the outcome.
        reference: the same quantities in the reference.
        unit: the unit roundoff of the outcome.
    """
    found = {LOSS: abs(own.loss - reference.loss) / max(abs(reference.loss), unit)}
    if own.outputs.shape == reference.outputs.shape:
        found[OUTPUTS] = _relative(own.outputs, reference.outputs, unit)
    dot = sum(float(g.double() @ reference.gradients[n].double()) for n, g in own.gradients.items())
    mine, other = _norm(own.gradients), _norm(reference.gradients)
    if other == 0:
        found |= dict.fromkeys((NORM, DIRECTION), 0.0 if mine == 0 else mine / _TINY)
    else:
        found[NORM] = abs(mine / other - 1)
        found[DIRECTION] = 1 - dot / (mine * other) if mine else 1.0
    for name, change in own.buffers.items():
        base = max(float(reference.buffers[name].norm()), _zero_of(reference, name, unit), _TINY)
        found[name] = float((change - reference.buffers[name]).norm()) / base
    return found


def _zero_of(reference: Outcome, name: str, unit: float) -> float:
    """Return the norm of what rounding makes of a buffer's change that is zero."""
    size = reference.buffers[name].numel() ** 0.5
    return unit * _UNITS_OF_ZERO * reference.levels.get(name, 0.0) * size


def _most_different(own: Outcome, reference: Outcome) -> str:
    """Return the names of the three parameters whose gradients differ most."""

    def size(name: str) -> float:
        difference = own.gradients[name].double() - reference.gradients[name].double()
        norm = float(difference.norm())
        return norm if norm == norm else float("inf")

    sizes = {name: size(name) for name in own.gradients}
    return ", ".join(sorted(sizes, key=lambda name: -sizes[name])[:3])


def _relative(own: torch.Tensor, other: torch.Tensor, unit: float) -> float:
    return float((own - other).norm()) / max(float(other.norm()), unit)


def _norm(tensors: Mapping[str, torch.Tensor]) -> float:
    return sum(float(each.double().square().sum()) for each in tensors.values()) ** 0.5


def tolerances(noise: Mapping[str, float], reference: Outcome, unit: float) -> dict[str, float]:
    """Return the largest differences that rounding may explain.

    That is four times what random changes of the weights and the data by a rounding do: little to a
    shallow model, much to one whose gradient is ill-conditioned, as with batch norms over few
    samples. It is at least 32 roundings of the loss and the outputs, and 5% of the rest.

    Args:
        noise: by how much the changed result differs from the reference.
        reference: the reference.
        unit: the size of a rounding.
    """
    allowed = {}
    for name, each in noise.items():
        change = each if math.isfinite(each) else math.inf
        if name in (LOSS, OUTPUTS):
            allowed[name] = max(_NOISE_FACTOR * change, _UNITS_OF_RESULT * unit)
        elif name == NORM:
            # Of what turns the gradient by an angle, as much may change its norm.
            angle = math.sqrt(2 * max(0.0, noise[DIRECTION]))
            most = min(_NOISE_FACTOR * max(angle, change), _MAX_NORM_CHANGE)
            allowed[name] = max(_KINK, most)
        elif name == DIRECTION:
            allowed[name] = max(_KINK**2 / 2, _NOISE_FACTOR * change)
        else:
            norm, zero = float(reference.buffers[name].norm()), _zero_of(reference, name, unit)
            floor = (_KINK * norm + zero) / max(norm, zero) if norm or zero else _KINK
            allowed[name] = max(_NOISE_FACTOR * change, floor)
    return allowed


def differences(
    own: Outcome, reference: Outcome, unit: float, allowed: Mapping[str, float]
) -> list[Difference]:
    """Return how an outcome differs from the reference; first what exceeds its tolerance most.

    Args:
        own: the outcome.
        reference: the reference.
        unit: the unit roundoff of the outcome.
        allowed: the result of `tolerances`.
    """
    names = _most_different(own, reference)
    found = [
        Difference(name, each, allowed[name], names if name in (NORM, DIRECTION) else "")
        for name, each in distances(own, reference, unit).items()
        if name in allowed
    ]
    return sorted(found, key=lambda each: -each.excess)
