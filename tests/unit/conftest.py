"""Lets no unit test change what later ones, and the processes that these start, inherit."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _own_signal_mask() -> Iterator[None]:
    """Unblock the signals that a command called in this process has blocked for good."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
