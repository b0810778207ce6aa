"""Draws on the last rows of the user's terminal while all other output scrolls above them.

The other ranks print whenever they like, through mpirun, and so does the user's code. Moving the
cursor up over the last frame, as progress bars do, would erase their lines and leave pieces of the
frame behind. So the view's rows are excluded from the scrolling region (DECSTBM), each frame is
drawn at absolute positions, and the cursor is put back where it was (DECSC, DECRC): whatever others
print appears above. A frame is one write, straight to the terminal, which the kernel never mixes
with others. Nothing is read from the terminal, and the cursor is not hidden.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kaitian_mpi.observe import guard_process
from kaitian_mpi.observe.user_terminal import NoTerminalError, open_terminal

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_ALL_SCROLL = "\x1b[r"
_LINE_DOWN = "\x1bD"  # scrolls at the end, and keeps the column
_MAX_CLOSING_SEC = 0.5


class Screen:
    """Draws on the last rows of a terminal.

    Args:
        owner: the pid of the process whose stdout is the terminal.

    Raises:
        NoTerminalError: it cannot be opened, or could not be reset if this process is killed.
    """

    def __init__(self, owner: int) -> None:
        self._descriptor = open_terminal(owner)
        self._unwritten = b""
        self._drawn: tuple[int, int, int] | None = None  # columns, rows, and rows of the view
        try:
            self._guard = _start_guard(owner)
        except (OSError, NoTerminalError) as error:
            os.close(self._descriptor)
            raise NoTerminalError(
                f"the process that would reset the terminal cannot be started: {error}"
            ) from error

    def size(self) -> tuple[int, int]:
        """Return the columns and rows now; 0, 0 if unknown."""
        try:
            columns, rows = os.get_terminal_size(self._descriptor)
        except OSError:
            return 0, 0
        return columns, rows

    def draw(self, lines: Sequence[str]) -> None:
        """Draw on as many of the last rows as there are lines; a slow terminal skips frames.

        Args:
            lines: may have escape sequences for colors; no wider than the terminal.

        Raises:
            OSError: the terminal is gone.
        """
        columns, rows = self.size()
        if not lines or len(lines) >= rows:
            self.hide()
        elif self._is_ready():
            now = (columns, rows, len(lines))
            frame = "" if now == self._drawn else self._make_room(len(lines))
            self._drawn = now
            top = rows - len(lines) + 1
            frame += f"{_SAVE}\x1b[1;{top - 1}r"
            for row, line in enumerate(lines, top):
                frame += f"\x1b[{row};1H\x1b[0m\x1b[2K{line}\x1b[0m"
            self._write(frame + _RESTORE)

    def hide(self) -> None:
        """Erase the view and let its rows scroll again.

        Raises:
            OSError: the terminal is gone.
        """
        if self._drawn is not None and self._is_ready():
            self._write(self._erase())
            self._drawn = None

    def close(self, lines: Sequence[str] = ()) -> None:
        """Let all rows scroll again, and leave these lines as text. Never raises."""
        with suppress(OSError):
            self._wait_until_ready()
            if self._drawn is not None:
                left = "".join(f"\r\n\x1b[0m{line}\x1b[0m" for line in lines)
                self._write(f"{self._erase()}{left}\r\n")
                self._wait_until_ready()
        if not self._unwritten:  # else the guard resets the terminal once it can be written
            self._guard.kill()
            self._guard.wait()
        with suppress(OSError):
            os.close(self._descriptor)

    def _make_room(self, wanted: int) -> str:
        """Return the sequence that moves all text above the view's rows."""
        return f"{self._erase()}{_LINE_DOWN * wanted}\x1b[{wanted}A"

    def _erase(self) -> str:
        """Return the sequence that erases the view and lets all rows scroll again.

        Everything below the cursor is the view, even after the terminal's size has changed: the
        cursor stays where the others print, above it.
        """
        below = "" if self._drawn is None else "\x1b[J"
        return f"{_SAVE}{_ALL_SCROLL}{_RESTORE}{below}"

    def _is_ready(self) -> bool:
        """Write more of the last frame if any is left; return whether all of it is written."""
        if self._unwritten:
            unwritten, self._unwritten = self._unwritten, b""
            self._write_bytes(unwritten)
        return not self._unwritten

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _MAX_CLOSING_SEC
        while not self._is_ready() and time.monotonic() < deadline:
            select.select([], [self._descriptor], [], _MAX_CLOSING_SEC)

    def _write(self, text: str) -> None:
        self._write_bytes(text.encode(errors="replace"))

    def _write_bytes(self, data: bytes) -> None:
        """Write without waiting."""
        with _no_stop():
            try:
                written = os.write(self._descriptor, data)
            except BlockingIOError:  # stopped by Ctrl-S, or slow
                written = 0
        self._unwritten = data[written:]


@contextmanager
def _no_stop() -> Iterator[None]:
    """Let a process in the background write, even where `stty tostop` would stop it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_guard(owner: int) -> subprocess.Popen[bytes]:
    """Start the process that resets the terminal when this one dies."""
    if not hasattr(os, "pidfd_open"):
        raise NoTerminalError("this system has no pidfd_open")
    os.close(os.pidfd_open(os.getpid()))  # raises on an old kernel or in a sandbox
    terminal = open_terminal(owner)
    try:
        os.set_blocking(terminal, True)
        path = str(Path(guard_process.__file__).resolve())
        return subprocess.Popen(  # noqa: S603  # our own file, no shell
            [sys.executable, "-I", "-S", path, "kaitian-terminal", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what ends the ranks must not end it
            cwd="/",
        )
    finally:
        os.close(terminal)
