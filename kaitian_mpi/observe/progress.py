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
        """Print epoch, step, loss, samples per second, time left, and the script's own figures."""
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
    if config.progress == "plain":
        return PlainProgress()
    reason = _why_not_live()
    if config.progress == "auto":
        reason = reason or _why_not_by_itself(len(infos))
    elif reason:
        _log.warning("no live view, printing plain lines instead: %s", reason)
    if reason:
        return PlainProgress()
    from kaitian_mpi.observe.live import LiveProgress  # rich is slow to import

    return LiveProgress(title, infos)


def _why_not_live() -> str:
    """Return why a live view cannot be drawn on stdout; empty if it can.

    Open MPI gives every rank a pseudo terminal, even if mpirun's output goes to a file; but only
    if that is a terminal, the pseudo terminal has a size.
    """
    if not sys.stdout.isatty():
        return "stdout is not a terminal"
    if os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return "TERM is unset or names a terminal that cannot move its cursor"
    columns, rows = os.get_terminal_size(sys.stdout.fileno())
    if columns == rows == 0:
        return "the output of mpirun is not a terminal"
    if columns < _MIN_COLUMNS or rows < _MIN_ROWS:
        return f"the terminal is smaller than {_MIN_COLUMNS} columns and {_MIN_ROWS} rows"
    return ""


def _why_not_by_itself(ranks: int) -> str:
    """Return why a live view is not drawn unless the user asks for it; empty if it is."""
    if ranks > 1:
        return "it would draw over what other ranks print"
    if os.environ.get("CI"):
        return "CI is set"
    with suppress(OSError):  # not the terminal of this session
        if os.tcgetpgrp(sys.stdout.fileno()) != os.getpgrp():
            return "the job runs in the background"
    return ""
