"""The file `timeline.json` of a run, to which one rank at a time appends."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from kaitian_mpi.observe.timeline.chrome import (
    BEGIN,
    END,
    RUN_PID,
    SEPARATOR,
    header,
    origin_of,
    process_lines,
)

NAME = "timeline.json"
_MAX_LINE = 1 << 20
_log = logging.getLogger(__name__)


class TimelineFile:
    """A timeline on disk; every call leaves it complete but for its closing bracket.

    What cannot be written, for example to a full disk, is dropped with a warning.
    """

    def __init__(self, folder: Path, origin: float) -> None:
        """Continue the folder's timeline, or create one.

        Args:
            folder: the run folder.
            origin: the Unix time at which the time of a new file is 0.
        """
        self._path = folder / NAME
        self._is_faulty = False
        self.origin = self._continue() or origin
        """The Unix time at which the file's time is 0: when its first job began."""
        self._write(b"")

    def append(self, lines: Sequence[bytes]) -> None:
        """Append events, each a line of JSON, or several lines with their separators."""
        self._write(b"".join(SEPARATOR + line for line in lines))

    def finish(self) -> None:
        """Write the closing bracket; a job that resumes the run removes it."""
        self._write(END)

    def _continue(self) -> float | None:
        """Make an earlier job's file ready to append to; return its origin.

        A file that is not a timeline, or a damaged one, is renamed to `timeline.json.old`.
        """
        try:
            with self._path.open("rb+") as file:
                origin = origin_of(file.readline(_MAX_LINE) + file.readline(_MAX_LINE))
                if origin is not None:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(max(0, size - _MAX_LINE))
                    tail = file.read()
                    file.truncate(size - len(tail) + complete_length(tail))
                    return origin
            self._path.replace(self._path.with_suffix(".json.old"))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._warn(error)
        return None

    def _write(self, content: bytes) -> None:
        before = 0
        try:
            with self._path.open("ab") as file:
                before = file.tell()
                if not before:
                    lines = [header(self.origin), *process_lines(RUN_PID, "run", -1)]
                    content = BEGIN + SEPARATOR.join(lines) + content
                file.write(content)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self._path, before)
            self._warn(error)
        else:
            self._is_faulty = False

    def _warn(self, error: OSError) -> None:
        if not self._is_faulty:  # once, not every few seconds
            reason = error.strerror or error
            text = "%s could not be written: %s; training continues, with gaps in the timeline"
            _log.warning(text, self._path, reason)
        self._is_faulty = True


def complete_length(tail: bytes) -> int:
    """Return how much of the end of a file is complete events, without a closing bracket."""
    if tail.endswith(END):
        return len(tail) - len(END)
    # A job that was killed may have written a part of its last events.
    while tail and not _is_event(tail[tail.rfind(b"\n") + 1 :]):
        tail = tail[: max(0, tail.rfind(b"\n") + 1 - len(SEPARATOR))]
    return len(tail)


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
