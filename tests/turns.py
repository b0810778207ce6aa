"""How long a thread's turns on a core are, where the kernel shows it."""

from pathlib import Path

import pytest

LONG_TURN_NS = 100_000_000


def turn_ns(thread: int) -> float:
    """Return how long the turns of a thread of this process are; skip the test if that is hidden.

    Args:
        thread: its native id.
    """
    try:
        lines = Path(f"/proc/self/task/{thread}/sched").read_text().splitlines()
        [turn] = [line.partition(" : ")[2] for line in lines if line.startswith("se.slice")]
    except (OSError, ValueError):
        pytest.skip("the kernel does not show how long a thread's turns are")
    return float(turn)
