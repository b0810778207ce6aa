"""Notes when the gradients of a bucket are ready: autograd says so of each parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from kaitian_mpi.distributed.collectives.compiler import not_compiled

_UNARMED = {-1}  # never empty, whatever is discarded from it


@not_compiled
class Readiness:
    """Whether the gradients of some parameters are ready, which share a bucket."""

    __slots__ = ("_left", "_on_ready", "is_filled", "is_ready")

    def __init__(self, on_ready: Callable[[Readiness, int], None]) -> None:
        """Wait for nothing yet.

        Args:
            on_ready: a bound method, called with this and the last parameter's index when the
                gradients are ready, and again with each that comes later.
        """
        # A parameter owns its hook, which has this: a strong reference would be a cycle.
        self._on_ready = weakref.WeakMethod(on_ready)
        self._left: set[int] = _UNARMED
        self.is_ready = False
        """Whether the gradients have become ready since `arm`."""
        self.is_filled = False
        """Whether they have been written to the bucket since `arm`, so that none may follow."""

    def arm(self, indices: Iterable[int], order: dict[int, None] | None) -> None:
        """Wait for the gradients of these parameters.

        Args:
            indices: of the parameters.
            order: becomes the order in which all gradients get ready, as keys; None: no need.
        """
        self.is_ready = self.is_filled = False
        self._left = set(indices) if order is None else _RecordedSet(indices, order)

    def disarm(self) -> None:
        """Wait for nothing."""
        self._left = _UNARMED

    def add(self, index: int) -> None:
        """Note that a parameter's gradient is ready."""
        left = self._left
        left.discard(index)
        if not left and (on_ready := self._on_ready()) is not None:
            on_ready(self, index)


@not_compiled
class ReadyHook:
    """Notes that a parameter's gradient is ready; called by autograd for each of them."""

    __slots__ = ("index", "readiness")

    readiness: Readiness
    """Of the bucket that the parameter is in."""

    def __init__(self, index: int) -> None:
        self.index = index

    def ready(self, _: torch.Tensor) -> None:
        """Note it; a hook for `register_post_accumulate_grad_hook`."""
        self.readiness.add(self.index)


class _RecordedSet(set[int]):
    """A set that records in which order its members are discarded."""

    def __init__(self, members: Iterable[int], order: dict[int, None]) -> None:
        super().__init__(members)
        self._order = order

    def discard(self, member: Any) -> None:
        """Discard a member."""
        self._order[member] = None
        super().discard(member)
