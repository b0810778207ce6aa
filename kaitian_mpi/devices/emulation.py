"""Emulated kinds and slowdowns, for trying a mixed job on plain CPUs.

All output and files of such a job are labelled "emulated".
"""

from __future__ import annotations

import time

from kaitian_mpi.errors import UserError


def parse_kinds(text: str, world_size: int) -> tuple[str, ...]:
    """Parse `--emulate-kinds gpu,gpu,mlu,mlu`: a label per world rank; none if the text is empty.

    Raises:
        UserError: a label is missing, or there are not `world_size` of them.
    """
    if not text:
        return ()
    labels = tuple(label.strip() for label in text.split(","))
    if len(labels) != world_size or not all(labels):
        given = len([label for label in labels if label])
        raise UserError(
            f"--emulate-kinds {text}: found {given} {'kind' if given == 1 else 'kinds'}, needed "
            f"{world_size}, one per rank; give as many as mpirun -np starts"
        )
    return labels


Schedule = tuple[tuple[int, float], ...]
"""A rank's slowdown factors: pairs (s, f) for f times slower from step s on, sorted by step."""


def parse_slowdown(text: str, world_size: int) -> tuple[Schedule, ...]:
    """Parse `--emulate-slowdown 2:3.0,3:3.0@50,3:1@90` into a schedule per world rank.

    An entry without a step applies from the start, including the benchmark; a rank without an entry
    has an empty schedule.

    Raises:
        UserError: an entry is not rank:factor or rank:factor@step, or is out of range.
    """
    changes: list[dict[int, float]] = [{} for _ in range(world_size)]
    for entry in filter(None, text.split(",")):
        rank, factor, step = _read_entry(entry)
        if not (0 <= rank < world_size and 1.0 <= factor < float("inf") and step >= 0):
            raise UserError(
                f"--emulate-slowdown: found {entry!r}, needed rank:factor or rank:factor@step with "
                f"a rank from 0 to {world_size - 1} and a factor of at least 1, such as 1:3.0@50"
            )
        changes[rank][step] = factor
    return tuple(tuple(sorted(of_rank.items())) for of_rank in changes)


def _read_entry(entry: str) -> tuple[int, float, int]:
    """Return rank, factor and step; rank -1 for a malformed entry."""
    rank, _, rest = entry.partition(":")
    factor, at, step = rest.partition("@")
    try:
        return int(rank), float(factor), int(step) if at else 0
    except ValueError:
        return -1, 1.0, 0


def is_slowed(schedule: Schedule) -> bool:
    """Return whether a rank is ever slowed down."""
    return any(factor > 1 for _, factor in schedule)


def describe_slowdown(schedule: Schedule) -> str:
    """Describe a schedule, e.g. `3x, 1x from step 90`; empty if the rank is never slowed down."""
    if not is_slowed(schedule):
        return ""
    return ", ".join(f"{f:g}x" + (f" from step {s}" if s else "") for s, f in schedule)


class Slowdown:
    """Slows this process down by sleeping in proportion to its compute time.

    Sleeping uses no core, so that a slow device can be emulated beside a fast one. The compute time
    is the calling thread's own CPU time: waiting for a core that another rank uses is not a
    property of the device, and is not multiplied. A factor of 1 never sleeps.
    """

    def __init__(self, schedule: Schedule = ()) -> None:
        self._schedule = schedule
        self._mark_sec = time.thread_time()
        self.go_to(0)

    def go_to(self, step: int) -> None:
        """Use the factor of this step, counted from 1; 0 is before training."""
        self.factor = next((f for since, f in reversed(self._schedule) if since <= step), 1.0)

    def start(self) -> None:
        """Start measuring compute time."""
        self._mark_sec = time.thread_time()

    def catch_up(self) -> None:
        """Sleep `factor - 1` times the CPU time since the last call of this or `start`.

        To be called by the thread that computes, which on the CPU is the one that calls backward.
        """
        if self.factor > 1.0:
            time.sleep((self.factor - 1.0) * (time.thread_time() - self._mark_sec))
        self._mark_sec = time.thread_time()
