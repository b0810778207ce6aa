"""Writes reports: the page, once or again and again, and each figure as a file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.files import replacing
from kaitian_mpi.observe.report.canvas import to_image
from kaitian_mpi.observe.report.figures import FIGURES
from kaitian_mpi.observe.report.page import make_page, reloading
from kaitian_mpi.observe.report.run import Run
from kaitian_mpi.observe.report.run_files import read_run

_MAX_SHARE = 0.1  # of a core, beside a training that may need them all
_MAX_PAUSE_SEC = 60.0


def watch(paths: Sequence[Path], target: Path, every_sec: float) -> None:
    """Write the page again and again, until all runs have ended or Ctrl-C is pressed.

    The page reloads itself in the browser until then. It is written only if a run's files have
    changed, by a process of the lowest priority that uses at most a tenth of a core.

    Args:
        paths: the folders of the runs.
        target: the page.
        every_sec: how long to wait between two pages, at least.

    Raises:
        UserError: a folder cannot be read, or the page cannot be written.
    """
    os.nice(19)
    page, seen = "", None
    try:
        while True:
            began = time.process_time()
            state = _state(paths)
            if state != seen:
                runs = [read_run(path) for path in paths]
                page, seen = make_page(runs), state
                if all(run.state != "unfinished" for run in runs):
                    break
                write(target, reloading(page, every_sec), "-o")
            used = time.process_time() - began
            time.sleep(max(every_sec, min(_MAX_PAUSE_SEC, used / _MAX_SHARE)))
    except KeyboardInterrupt:
        pass
    if page:
        write(target, page, "-o")


def _state(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return what changes whenever a file of the runs does."""
    found = []
    for path in sorted(file for folder in paths for file in folder.glob("*.json*")):
        try:
            status = path.stat()
        except FileNotFoundError:  # replaced at this moment
            continue
        found.append((str(path), status.st_mtime_ns, status.st_size))
    return found


def write_images(folder: Path, runs: Sequence[Run], formats: Sequence[str]) -> int:
    """Write each figure of each run to a folder; return the number of files.

    Raises:
        UserError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--images {folder}: {error.strerror}; name another folder") from error
    count = 0
    for name, figure in _figures(runs):
        for kind in formats if figure is not None else ():
            write(folder / f"{name}.{kind}", to_image(figure, kind), "--images")
            count += 1
    return count


def _figures(runs: Sequence[Run]) -> Iterator[tuple[str, Any]]:
    """Yield the names and figures of all runs; None for a figure without content."""
    for number, run in enumerate(runs, 1):
        prefix = f"run{number}-" if len(runs) > 1 else ""
        for spec in FIGURES:
            yield f"{prefix}{spec.name}", spec.draw(run)


def check_writable(path: Path) -> None:
    """Check that a file can be written, before much is drawn.

    Raises:
        UserError: it cannot.
    """
    folder = path.resolve().parent
    if path.is_dir():
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"{folder} is not a folder"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        reason = "no permission"
    else:
        return
    raise UserError(f"{path}: cannot be written ({reason}); name another file with -o")


def write(path: Path, content: str | bytes, flag: str) -> None:
    """Write a file atomically.

    Args:
        path: the file.
        content: text or bytes.
        flag: the flag that names another place, for the error.

    Raises:
        UserError: it cannot be written.
    """
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # such as /dev/stdout
            return
        with replacing(path.resolve(), shared=True) as file:
            file.write(data)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); name another place with {flag}"
        ) from error
