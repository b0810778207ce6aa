"""Judges whether a device's loss and gradients differ from a reference by more than rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch

from kaitian_mpi.train.gradient_probe import Gradients, rms

LOSS = "the loss"
_NOISE_FACTOR = 4.0  # how much more than random changes rounding may do
_KINK = 0.05  # a single rounding may switch a ReLU, with or without the random changes
_UNITS_OF_RESULT = 32.0
_UNITS_OF_ZERO = 8.0
_TINY = 1e-300


@dataclass(frozen=True)
class Tolerance:
    """What a result may differ from the reference by; the same on every rank."""

    norms: dict[str, float]
    """Of the reference: the norms of each gradient and of each buffer's change, and the absolute
    value of the loss."""
    changes: dict[str, float]
    """The norms of what random changes of the size of a rounding did to them."""
    floors: dict[str, float]
    """The norm that is rounding in any case."""
    zero: float
    """What rounding may make of an element of a gradient that is zero."""

    def allowed(self, name: str) -> float:
        """Return the largest norm of a difference that rounding may explain."""
        return max(_NOISE_FACTOR * self.changes[name], self.floors[name])


@dataclass(frozen=True)
class Difference:
    """How a gradient, or the loss, differs from the reference."""

    name: str
    relative: float
    """The norm of the difference by that of the reference; NaN if either is not finite."""
    allowed: float
    """The relative difference that rounding may explain."""

    @property
    def excess(self) -> float:
        """The difference by the allowed one: above 1, it is not rounding."""
        return math.inf if math.isnan(self.relative) else self.relative / self.allowed

    def __str__(self) -> str:
        """Return both, such as `conv.weight 1.2e+00 (allowed 3.1e-05)`."""
        return f"{self.name} {self.relative:.1e} (allowed {self.allowed:.1e})"


def tolerance_of(reference: Gradients, changed: Gradients, unit: float) -> Tolerance:
    """Return the tolerance for results that are computed with some unit roundoff.

    It is four times what random changes of this size do to the result: little to a shallow model,
    much to one whose gradient is ill-conditioned, as with batch norms over few samples. In any case
    a gradient may differ by 5%, and by a few roundings of a typical one, as where a sum is zero.

    Args:
        reference: the reference.
        changed: the same with random changes.
        unit: the size of a rounding.
    """
    norms = {name: _norm(tensor) for name, tensor in reference.tensors.items()}
    changes = {name: _change_of(name, changed, reference) for name in norms}
    # A single number may by chance have changed little.
    typical = [changes[name] / norms[name] for name in reference.by_name if norms[name]]
    relative = median(typical) if typical else 0.0
    zero = unit * _UNITS_OF_ZERO * rms(reference.by_name.values())
    floors = {}
    for name, gradient in reference.by_name.items():
        changes[name] = max(changes[name], norms[name] * min(relative, 1.0))
        floors[name] = _KINK * norms[name] + zero * gradient.numel() ** 0.5
    for name, level in reference.levels.items():
        size = reference.buffers[name].numel() ** 0.5
        floors[name] = _KINK * norms[name] + unit * _UNITS_OF_ZERO * level * size
    norms[LOSS] = abs(reference.loss)
    changes[LOSS] = _finite(abs(changed.loss - reference.loss))
    floors[LOSS] = unit * _UNITS_OF_RESULT * norms[LOSS] + zero
    return Tolerance(norms, changes, floors, zero)


def differences(
    own: Gradients, reference: Mapping[str, torch.Tensor], loss: float, tolerance: Tolerance
) -> list[Difference]:
    """Return how a result differs from the reference, what exceeds its tolerance most first.

    Where the reference is not finite, there is nothing to compare. A parameter without a gradient
    has one of zero, and a buffer that is not changed a change of zero.

    Args:
        own: the result.
        reference: gradients, and changes of buffers, by name.
        loss: the reference's.
        tolerance: for the result.
    """
    found = [_difference(LOSS, abs(own.loss - loss), tolerance)]
    mine_by_name = own.tensors
    names = dict.fromkeys([*reference, *mine_by_name])
    for name in names:
        if name in reference:
            other = reference[name]
            mine = mine_by_name.get(name, torch.zeros_like(other))
            found.append(_difference(name, _norm(mine.double() - other.double()), tolerance))
        else:  # the reference has not used it
            extra = mine_by_name[name]
            of_zero = max(tolerance.zero * extra.numel() ** 0.5, _TINY)
            found.append(Difference(name, _norm(extra) / of_zero, 1.0))
    compared = [each for each in found if math.isfinite(tolerance.norms.get(each.name, 0.0))]
    return sorted(compared, key=lambda each: -each.excess)


def _difference(name: str, norm: float, tolerance: Tolerance) -> Difference:
    allowed = max(tolerance.allowed(name), _TINY)
    # Relative to what is allowed, where the reference is zero but for rounding.
    base = max(tolerance.norms[name], tolerance.floors[name], _TINY)
    relative = norm / base if math.isfinite(norm) else math.nan
    return Difference(name, relative, allowed / base)


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())


def _change_of(name: str, changed: Gradients, reference: Gradients) -> float:
    other, base = changed.tensors.get(name), reference.tensors[name]
    return _finite(_norm(base if other is None else other.double() - base.double()))


def _finite(change: float) -> float:
    """Return a change; infinity where rounding alone leads to no number."""
    return change if math.isfinite(change) else math.inf
