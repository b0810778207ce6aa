"""Error feedback: what a gradient has lost on a slow link is added to the next one.

So the weights follow the exact gradients, a few steps late (Karimireddy et al. 2019, "Error
Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv 1901.09847).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kaitian_mpi.distributed.network.formats import WireFormat

_COMPRESSED = torch.float32, torch.float16, torch.bfloat16


class Residual:
    """The rounding errors of one buffer of this rank's gradients, to be sent with the next ones.

    It changes by `keep` only, so a step that is repeated adds the same again. The first `count`
    values of the buffer are gradients, which cross as `wire`; the others cross exactly.
    """

    def __init__(self, wire: WireFormat, count: int) -> None:
        self.wire = wire
        self.count = count
        self.value: torch.Tensor | None = None
        """The kept residual, [count] in float32 on the host; None if this rank has none."""
        self._next: torch.Tensor | None = None

    def restore(self, value: torch.Tensor | None) -> None:
        """Keep this instead of what there is, and of what was noted."""
        self.value = value
        self._next = None

    def add_to(self, values: torch.Tensor, start: int) -> None:
        """Add the kept residual to the gradients from `start` on, in place."""
        if self.value is not None:
            values += self.value[start : start + values.numel()]

    def lost_part(self, start: int, count: int) -> torch.Tensor:
        """Return where to note what is rounded off `count` gradients from `start` on.

        It counts from `keep` on; the next step overwrites what has not been kept.
        """
        if self._next is None:
            self._next = torch.zeros(self.count)
        return self._next[start : start + count]

    def keep(self) -> None:
        """Keep what was noted: the step is done. A NaN or an infinity is not kept."""
        if self._next is not None and math.isfinite(float(self._next.sum())):
            self.value, self._next = self._next, self.value  # its memory is used again


class Residuals:
    """The residuals of a model's gradients, by parameter; for any buffers these travel in."""

    def __init__(self, wire: str = "fp32") -> None:
        self.wire = wire
        self._parts: list[tuple[Residual, Mapping[str, slice]]] = []
        self._waiting: dict[str, torch.Tensor] = {}

    def clear(self) -> None:
        """Forget the buffers, but not their parameters' residuals."""
        self._waiting = self.state_dict()
        self._parts = []

    def add(self, buffer: torch.Tensor, places: Mapping[str, slice]) -> Residual | None:
        """Return the residual of a buffer; None if its values cross as they are."""
        if self.wire == "fp32" or buffer.dtype not in _COMPRESSED:
            return None
        from kaitian_mpi.distributed.network.formats import FORMATS

        count = max(place.stop for place in places.values())
        residual = Residual(FORMATS[self.wire], count)
        self._fill(residual, places)
        self._parts.append((residual, places))
        return residual

    def keep(self) -> None:
        """Keep what the step has rounded off: it is done."""
        for residual, _ in self._parts:
            residual.keep()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's residuals by parameter, flat; without those that it has none of."""
        state = dict(self._waiting)
        for residual, places in self._parts:
            if residual.value is not None:
                state |= {name: residual.value[place].clone() for name, place in places.items()}
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state_dict` returned, on this rank or another."""
        self._waiting = dict(state)
        for residual, places in self._parts:
            self._fill(residual, places)

    def _fill(self, residual: Residual, places: Mapping[str, slice]) -> None:
        restored = [name for name in places if name in self._waiting]
        value = torch.zeros(residual.count) if restored else None
        for name in restored:
            assert value is not None
            value[places[name]] = self._waiting.pop(name)
        residual.restore(value)


def add_up(states: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the sum of several ranks' `Residuals.state_dict`, for one rank to send."""
    total: dict[str, torch.Tensor] = {}
    for state in states:
        for name, value in state.items():
            total[name] = total[name] + value if name in total else value
    return total
