"""Shows the progress of a run: plain lines, or a live view if stdout is a terminal."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.observe.reading import Reading, duration
from kaitian_mpi.observe.sink import MetricsSink

_log = logging.getLogger(__name__)

_MIN_COLUMNS, _MIN_ROWS = 32, 10


class PlainProgress(MetricsSink):
    """Prints a line for each reading."""

    def on_reading(self, reading: Reading) -> None:
        parts = [
            f"epoch {reading.epoch + 1}/{reading.epochs}",
            f"step {reading.step}/{reading.total_steps}",
            f"loss {reading.loss:.4f}",
            f"{reading.samples_per_sec:.1f} samples/s",
            f"{duration(reading.seconds_left)} left",
        ]
        parts += [f"{name} {value:.4g}" for name, value in reading.logged.items()]
        print(" | ".join(parts), flush=True)


def open_progress(config: TrainingConfig, infos: Sequence[RankInfo], title: str) -> MetricsSink:
    """Return the sink that shows the progress, on the rank that writes the files."""
    if config.quiet or config.progress == "none":
        return MetricsSink()
    is_live = config.progress == "live" or (config.progress == "auto" and _owns_terminal(infos))
    if is_live and _can_draw():
        from kaitian_mpi.observe.live import LiveProgress  # rich is slow to import

        return LiveProgress(title, infos)
    if config.progress == "live":
        _log.warning(
            "no live view, printing plain lines instead: mpirun's output is not a terminal of at "
            "least %d columns and %d rows that can move its cursor (TERM)",
            *(_MIN_COLUMNS, _MIN_ROWS),
        )
    return PlainProgress()


def _can_draw() -> bool:
    """Return whether a live view can be drawn on stdout.

    Open MPI gives every rank a pseudo terminal, even if mpirun's output goes to a file; but only
    if that is a terminal, the pseudo terminal has a size.
    """
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return False
    columns, rows = os.get_terminal_size(sys.stdout.fileno())
    return columns >= _MIN_COLUMNS and rows >= _MIN_ROWS


def _owns_terminal(infos: Sequence[RankInfo]) -> bool:
    """Return whether a live view would neither draw over other output nor disturb anybody."""
    if len(infos) > 1 or os.environ.get("CI"):
        return False
    with suppress(OSError):  # not the terminal of this session
        return os.tcgetpgrp(sys.stdout.fileno()) == os.getpgrp()
    return True
