"""Configures the package's logging; no other module does. Prints what a pipe may not take."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

_PACKAGE = "kaitian_mpi"


class _Handler(logging.StreamHandler[TextIO]):
    """Adds a prefix to each message, and the level's name unless it is INFO."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        """Return the message as a line, or several lines if it has a traceback."""
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{self._prefix} {level}{super().format(record)}"

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record to what `sys.stderr` is at that moment: the live view replaces it."""
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(level: str, prefix: str, rank: int = 0) -> None:
    """Write the package's log messages to stderr, a line each.

    At `info`, ranks other than 0 show only warnings and errors: most of what they log is the same.
    """
    logger = logging.getLogger(_PACKAGE)
    logger.handlers[:] = [_Handler(prefix)]
    logger.propagate = False  # otherwise a script's own configuration would repeat each message
    lowest = logging.getLevelNamesMapping()[level.upper()]
    logger.setLevel(max(lowest, logging.WARNING) if rank and level == "info" else lowest)
    logging.raiseExceptions = False  # a closed terminal must not end a job


def print_text(text: str, stream: TextIO | None = None) -> None:
    """Print text, also to a reader that has closed the pipe, such as `head`."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
