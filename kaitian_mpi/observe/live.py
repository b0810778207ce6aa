"""The live view of a run, on the last rows of the user's terminal."""

from __future__ import annotations

import io
import sys
import time
from dataclasses import replace

from rich.console import Console

from kaitian_mpi.observe.plain import PlainProgress
from kaitian_mpi.observe.reading import Evaluated, Event, Reading
from kaitian_mpi.observe.screen import Screen
from kaitian_mpi.observe.sink import MetricsSink
from kaitian_mpi.observe.user_terminal import MIN_COLUMNS, MIN_ROWS, is_in_foreground
from kaitian_mpi.observe.view import MIN_HEIGHT, ViewState, render

_MAX_WIDTH = 120
_MAX_HEIGHT = 21  # 16 ranks
_MAX_SHARE = 1 / 150  # of the training thread's time that drawing may take
_MIN_SEC_BETWEEN = 0.2
_FORWARD_OUTPUT_SEC = 0.1
_ENDS = ("finish", "stop")


class LiveView(MetricsSink):
    """Draws each reading and event; where the terminal cannot be drawn on, prints plain lines.

    It draws in the training thread and needs no thread of its own: between readings, nothing on
    it changes.

    Args:
        screen: where to draw.
        owner: the pid of the process whose terminal it is.
        state: what is known before the first reading.
        unicode: whether the terminal has more characters than ASCII.
    """

    def __init__(self, screen: Screen, owner: int, state: ViewState, unicode: bool) -> None:
        self._screen: Screen | None = screen
        self._owner, self._state, self._unicode = owner, state, unicode
        self._plain = PlainProgress()
        self._next_draw = 0.0

    def read(self, reading: Reading) -> None:
        """Draw the reading."""
        self._state = replace(self._state, reading=reading)
        if not self._draw():
            self._plain.read(reading)

    def evaluated(self, evaluated: Evaluated) -> None:
        """Draw the results."""
        self._state = self._state.with_evaluation(evaluated)
        self._draw()

    def happened(self, event: Event) -> None:
        """Draw what it says about ranks; the run's last event ends the view."""
        self._state = self._state.with_event(event)
        if event.kind in _ENDS:
            self._end(waits=event.kind == "finish")
        elif event.kind in ("slow", "slow_end", "loss"):
            self._draw()

    def close(self, finished: bool) -> None:
        """Leave the last view as text."""
        self._end(waits=finished)

    def _draw(self) -> bool:
        """Draw, unless it was drawn a moment ago; return whether the view is on the screen."""
        screen = self._screen
        if screen is None or self._state.reading is None:
            return False
        began = time.perf_counter()
        try:
            if not is_in_foreground(self._owner):
                screen.hide()
                return False
            columns, rows = screen.size()
            height = min(_MAX_HEIGHT, rows // 2)
            if columns < MIN_COLUMNS or rows < MIN_ROWS:
                screen.hide()
                return False
            if began >= self._next_draw:
                screen.draw(self._lines(min(columns, _MAX_WIDTH), max(MIN_HEIGHT, height)))
                took = time.perf_counter() - began
                self._next_draw = began + max(_MIN_SEC_BETWEEN, took / _MAX_SHARE)
        except OSError:  # the terminal is gone
            self._screen = None
            screen.close()
            return False
        return True

    def _end(self, waits: bool) -> None:
        """Give the terminal back, and leave the last view there.

        Args:
            waits: whether to give the launcher time to forward what was printed before.
        """
        screen, self._screen = self._screen, None
        if screen is None:
            return
        lines = []
        if self._state.reading is not None:
            sys.stdout.flush()
            time.sleep(_FORWARD_OUTPUT_SEC if waits else 0)
            columns, rows = screen.size()
            lines = self._lines(min(columns, _MAX_WIDTH), max(MIN_HEIGHT, min(_MAX_HEIGHT, rows)))
        screen.close(lines)

    def _lines(self, width: int, height: int) -> list[str]:
        """Return the view with escape sequences for colors, or without if NO_COLOR is set."""
        console = Console(
            file=io.StringIO(), force_terminal=True, width=max(1, width), legacy_windows=False
        )
        with console.capture() as capture:
            console.print(render(self._state, width, height, self._unicode))
        return capture.get().splitlines()
