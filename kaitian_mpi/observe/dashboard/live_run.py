"""What the page shows: a run folder, read and drawn again only when it has changed.

Reading and drawing are limited to a share of one core, however many browsers ask.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.dashboard.budget import Budget, SpareCores
from kaitian_mpi.observe.report.canvas import figures_of
from kaitian_mpi.observe.report.figures import FIGURES, FigureSpec
from kaitian_mpi.observe.report.run import Run
from kaitian_mpi.observe.report.run_files import read_run
from kaitian_mpi.observe.report.svg import to_svg

_log = logging.getLogger(__name__)

WIDE, NARROW = 7.0, 4.4
"""Widths of figures, in inches of 96 pixels: on a desktop, and on a phone."""
_Files = list[tuple[str, int, int, int]]
"""The name, inode, size and modification time in nanoseconds of each file."""
_MIN_INTERVAL_SEC = 1.0


@dataclass(frozen=True)
class FolderState:
    """What was read from the run folder at one time.

    Attributes:
        run: the run, as last read without error; None if it never was.
        version: unique to this state, even among the processes that serve the run in turn.
        fault: why the folder could not be read; empty if it could.
        changed_at: when a file was last modified, in seconds since 1970.
    """

    run: Run | None = None
    version: str = ""
    fault: str = ""
    changed_at: float = 0.0

    @property
    def minutes_old(self) -> int:
        """Whole minutes since a file was last modified."""
        return max(0, int(time.time() - self.changed_at) // 60) if self.changed_at else 0


@dataclass
class _Drawn:
    """The figures of one state that were asked for so far."""

    state: FolderState
    figures: dict[tuple[str, float], bytes] = field(default_factory=dict)


class LiveRun:
    """A run folder that changes; all methods may be called from several threads.

    Args:
        folder: the run folder.
        specs: the figures to draw.
    """

    def __init__(self, folder: Path, specs: Sequence[FigureSpec] = FIGURES) -> None:
        self.folder = folder
        self.specs = {spec.name: spec for spec in specs}
        # An open page may next ask the process that took over from the one that served it.
        self._name, self._numbers = secrets.token_hex(4) + "-", itertools.count(1)
        self._lock = threading.Lock()
        # One thread for all figures, as matplotlib keeps fonts by thread.
        self._drawing_thread = ThreadPoolExecutor(1, "kaitian-figures", _load_matplotlib)
        self._newest = FolderState()
        self._drawn = _Drawn(self._newest)
        self._seen: _Files | str | None = None
        spare = SpareCores()
        self._reading, self._drawing = Budget(spare.share), Budget(spare.share)

    def refresh(self) -> tuple[FolderState, str]:
        """Return the newest state, read again if it is time, and the version the figures show."""
        with self._lock:
            self._read_if_changed()
            if self._drawn.state is not self._newest and self._drawing.is_free():
                self._drawn = _Drawn(self._newest)
                self._drawing.rest(_MIN_INTERVAL_SEC)
            return self._newest, self._drawn.state.version

    def figure(self, name: str, width: float = WIDE) -> bytes:
        """Return a figure as an SVG document; if there is nothing to draw yet, it says so.

        Args:
            name: the figure's name.
            width: in inches.

        Raises:
            KeyError: there is no such figure.
        """
        spec = self.specs[name]
        if not self._drawn.state.version:
            self.refresh()
        with self._lock:
            drawn = self._drawn
        return self._drawing_thread.submit(self._draw_once, drawn, spec, width).result()

    def _draw_once(self, drawn: _Drawn, spec: FigureSpec, width: float) -> bytes:
        key = spec.name, width
        if key not in drawn.figures:
            began = time.thread_time()
            drawn.figures[key] = _draw(spec, drawn.state.run, width)
            with self._lock:
                self._drawing.spend(time.thread_time() - began)
        return drawn.figures[key]

    def _read_if_changed(self) -> None:
        if not self._reading.is_free():
            return
        seen = _fingerprint(self.folder)
        if seen == self._seen:
            return
        began = time.thread_time()
        run, fault = self._newest.run, ""
        try:
            run = read_run(self.folder)
        except (UserError, OSError) as error:
            fault = str(error)
        self._seen = seen
        version = f"{self._name}{next(self._numbers)}"
        changed_at = _last_change(seen) or self._newest.changed_at
        self._newest = FolderState(run, version, fault, changed_at)
        self._reading.spend(time.thread_time() - began)
        self._reading.rest(_MIN_INTERVAL_SEC)


def _fingerprint(folder: Path) -> _Files | str:
    """Return a value that differs once a file of the folder has changed."""
    found: _Files = []
    try:
        for path in sorted((*folder.glob("*.json"), *folder.glob("*.jsonl"))):
            status = path.stat()
            found.append((path.name, status.st_ino, status.st_size, status.st_mtime_ns))
    except OSError as error:
        return str(error)
    return found


def _load_matplotlib() -> None:
    """Import matplotlib, which takes a second, so that this does not count as drawing."""
    with suppress(ImportError):  # each figure will then say so
        from matplotlib import font_manager  # noqa: F401


def _last_change(seen: _Files | str) -> float:
    """Return when the newest file was modified, in seconds since 1970; 0 if there is none."""
    return 0.0 if isinstance(seen, str) else max((file[-1] / 1e9 for file in seen), default=0.0)


def _draw(spec: FigureSpec, run: Run | None, width: float) -> bytes:
    if run is None:
        return _text_svg(f"{spec.title}: nothing to show yet")
    try:
        with figures_of(width):
            figure = spec.draw(run)
        if figure is None:
            return _text_svg(f"{spec.title}: nothing to show yet")
        for text in figure.texts:  # its title and notes
            text.set_wrap(True)
        return to_svg(figure, spec.alt(run), spec.name).encode(errors="replace")
    except Exception as error:  # one figure that fails must not break the page
        fault = f"{type(error).__name__}: {error}"
        _log.warning("dashboard: figure %s could not be drawn: %s", spec.name, fault)
        return _text_svg(f"{spec.title}: could not be drawn ({type(error).__name__})")


def _text_svg(text: str) -> bytes:
    """Return an SVG document with a line of text."""
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="80" viewBox="0 0 640 80" '
        f'role="img" aria-label="{escape(text)}">'
        '<text x="320" y="46" text-anchor="middle" font-family="sans-serif" font-size="18" '
        f'fill="#595959">{escape(text)}</text></svg>'
    ).encode()
