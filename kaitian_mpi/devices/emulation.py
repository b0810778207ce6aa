"""Emulated kinds and slowdowns, for trying a mixed job on plain CPUs.

All output and files of such a job are labelled "emulated".
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from kaitian_mpi.errors import UserError

KINDS_FLAG = "--emulate-kinds"
SLOWDOWN_FLAG = "--emulate-slowdown"
KINDS_VARIABLE = "KAITIAN_EMULATE_KINDS"
"""The environment variable that applies where `--emulate-kinds` is not given."""
SLOWDOWN_VARIABLE = "KAITIAN_EMULATE_SLOWDOWN"
"""The environment variable that applies where `--emulate-slowdown` is not given."""

_MAX_FACTOR = 1e6  # so that the longest sleep is one that the operating system can do


def parse_kinds(text: str, world_size: int, name: str = KINDS_FLAG) -> tuple[str, ...]:
    """Parse `gpu,gpu,mlu,mlu`: a label per world rank; none if the text is empty.

    Args:
        text: the labels.
        world_size: the number of ranks.
        name: the flag or variable with this value, for error messages.

    Raises:
        UserError: a label is missing or malformed, or there are not `world_size` of them.
    """
    if not text:
        return ()
    labels = tuple(label.strip() for label in text.split(","))
    for label in filter(None, labels):
        # Labels become part of file names, tables and the lists of other flags.
        if not re.fullmatch(r"[\w.+-]+", label, re.ASCII):
            raise UserError(
                f"{name}: found the kind {label!r}, needed one of letters, digits, '_', '-', '+' "
                "and '.', such as gpu or mlu; rename it"
            )
    if len(labels) != world_size or not all(labels):
        given = len([label for label in labels if label])
        raise UserError(
            f"{name} {text}: found {given} {'kind' if given == 1 else 'kinds'}, needed "
            f"{world_size}, one per rank; give as many as mpirun -np starts"
        )
    return labels


Schedule = tuple[tuple[int, float], ...]
"""A rank's slowdown factors: pairs (s, f) for f times slower from step s on, sorted by step."""


def parse_slowdown(text: str, world_size: int, name: str = SLOWDOWN_FLAG) -> tuple[Schedule, ...]:
    """Parse `2:3.0,3:3.0@50,3:1@90` into a schedule per world rank.

    An entry without a step applies from the start, including the benchmark; a rank without an entry
    has an empty schedule.

    Args:
        text: the entries.
        world_size: the number of ranks.
        name: the flag or variable with this value, for error messages.

    Raises:
        UserError: an entry is not rank:factor or rank:factor@step, or is out of range.
    """
    changes: list[dict[int, float]] = [{} for _ in range(world_size)]
    for entry in filter(None, map(str.strip, text.split(","))):
        rank, factor, step = _read_entry(entry)
        if not (0 <= rank < world_size and 1.0 <= factor <= _MAX_FACTOR and step >= 0):
            raise UserError(
                f"{name}: found {entry!r}, needed rank:factor or rank:factor@step with a rank from "
                f"0 to {world_size - 1} and a factor from 1 to 1e6, such as 1:3.0@50"
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


def check_slowdown_on(
    is_host: bool, device: object, schedules: Sequence[Schedule], name: str = SLOWDOWN_FLAG
) -> None:
    """Check that this rank's device is a CPU, whose computing can be measured, if any is slowed.

    Args:
        is_host: whether the device is a CPU.
        device: its name, for the error message.
        schedules: of all ranks.
        name: the flag or variable that slows them, for the error message.

    Raises:
        UserError: it is not.
    """
    if any(map(is_slowed, schedules)) and not is_host:
        raise UserError(f"{name}: found a {device} rank, needed CPU ranks only; give --devices cpu")


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
