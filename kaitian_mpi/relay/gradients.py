"""Which all_reduces are of gradients: only these may lose digits on their way between kinds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_thread = threading.local()


@contextmanager
def summing_gradients() -> Iterator[None]:
    """Mark the all_reduces that this thread starts inside; must be the same on every rank."""
    _thread.are_gradients = True
    try:
        yield
    finally:
        _thread.are_gradients = False


def are_gradients() -> bool:
    """Return whether an all_reduce that this thread starts now is of gradients."""
    return getattr(_thread, "are_gradients", False)
