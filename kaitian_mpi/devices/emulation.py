"""Emulated kinds and slowdowns, so that a mixed job can be tried on plain CPUs.

Whatever is made with these is labelled "emulated" wherever it is shown or written.
"""

from __future__ import annotations

import time

from kaitian_mpi.errors import UserError


def parse_kinds(text: str, world_size: int) -> tuple[str, ...]:
    """Read `--emulate-kinds gpu,gpu,mlu,mlu`: a label per world rank; empty text gives none.

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


def parse_slowdown(text: str, world_size: int) -> tuple[float, ...]:
    """Read `--emulate-slowdown 2:3.0,3:3.0` into a factor (1.0 or more) per world rank.

    Raises:
        UserError: an entry is not rank:factor, or is out of range.
    """
    factors = [1.0] * world_size
    for entry in filter(None, text.split(",")):
        rank, _, factor = entry.partition(":")
        try:
            number, value = int(rank), float(factor)
        except ValueError:
            number, value = -1, 0.0
        if not (0 <= number < world_size and 1.0 <= value < float("inf")):
            raise UserError(
                f"--emulate-slowdown: found {entry!r}, needed rank:factor with a rank from 0 to "
                f"{world_size - 1} and a factor of at least 1, such as 1:3.0"
            )
        factors[number] = value
    return tuple(factors)


class Slowdown:
    """Makes this process `factor` times slower by sleeping for what it computed.

    Sleeping costs no core, so that a slow device can be emulated honestly beside a fast one. What
    was computed is the calling thread's own CPU time: waiting for a core that another rank holds is
    no property of the device, and is not multiplied. A factor of 1 never sleeps.
    """

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self._mark_sec = time.thread_time()

    def start(self) -> None:
        """Begin a stretch of computing."""
        self._mark_sec = time.thread_time()

    def catch_up(self) -> None:
        """Sleep `factor - 1` times the CPU time since the last mark, and set a new mark.

        To be called by the thread that computes, which on the CPU is the one that calls backward.
        """
        if self.factor > 1.0:
            time.sleep((self.factor - 1.0) * (time.thread_time() - self._mark_sec))
        self._mark_sec = time.thread_time()
