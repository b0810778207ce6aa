"""Which all_reduces are of gradients: only these may lose digits on their way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kaitian_mpi.distributed.network.residual import Residual


class GradientSum(NamedTuple):
    """How the gradients of one all_reduce may cross; the same on every rank."""

    residual: Residual | None
    """What slow links round off them; None if they cross as they are."""


_thread = threading.local()


@contextmanager
def summing_gradients(residual: Residual | None = None) -> Iterator[None]:
    """Mark the all_reduces that this thread starts inside; must be the same on every rank."""
    _thread.current = GradientSum(residual)
    try:
        yield
    finally:
        _thread.current = None


def gradient_sum() -> GradientSum | None:
    """Return how an all_reduce that this thread starts now may cross, if it is of gradients."""
    current: GradientSum | None = getattr(_thread, "current", None)
    return current
