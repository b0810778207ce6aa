"""The live view on a pseudo terminal, as the screen of a terminal shows it."""

import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from terminal_model import TerminalModel

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.observe import choice
from kaitian_mpi.observe.live import LiveView
from kaitian_mpi.observe.plain import PlainProgress
from kaitian_mpi.observe.screen import Screen
from kaitian_mpi.observe.sink import MetricsSink
from kaitian_mpi.observe.user_terminal import (
    NoTerminalError,
    find_terminal,
    is_in_foreground,
    open_terminal,
)
from kaitian_mpi.observe.view import ViewState

from test_live_view import event, reading  # isort: skip

TIMEOUT_SEC = 10.0


class PseudoTerminal:
    """A terminal with a process that sits at it, and what its screen shows."""

    def __init__(self, columns=60, rows=20):
        self.master, self.slave = os.openpty()
        self.model = TerminalModel(columns, rows)
        self.resize(columns, rows)
        os.set_blocking(self.master, False)
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "sleep", "60"], stdin=self.slave, stdout=self.slave
        )
        deadline = time.monotonic() + TIMEOUT_SEC
        while not is_in_foreground(self.process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def resize(self, columns, rows):
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if (columns, rows) != (self.model.columns, self.model.rows):
            self.model.resize(columns, rows)

    def print(self, text):
        """Print as mpirun does for the other ranks."""
        os.write(self.slave, text.encode())

    def lines(self):
        self.read()
        return self.model.lines()

    def read(self):
        try:
            while data := os.read(self.master, 65536):
                self.model.feed(data)
        except BlockingIOError:
            pass

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal():
    made = PseudoTerminal()
    yield made
    made.close()


@pytest.fixture
def screen(terminal):
    made = Screen(terminal.process.pid)
    yield made
    made.close()


def test_what_others_print_scrolls_above_the_view(terminal, screen):
    for number in range(5):
        terminal.print(f"before {number}\n")
    for number in range(30):
        screen.draw(["=====", f"view {number}"])
        terminal.print(f"line {number}\nnext {number}\n")
    found = terminal.lines()
    assert found[-2:] == ["=====", "view 29"]
    expected = [f"before {number}" for number in range(5)]
    expected += [f"{word} {number}" for number in range(30) for word in ("line", "next")]
    assert [*terminal.model.history, *found[:-2]] == [*expected, ""]


def test_a_line_may_be_printed_in_parts_between_frames(terminal, screen):
    terminal.print("\n" * 18)
    for part in ("one", " two", "\r10%", "\r100%", "\n\x1b[33mdone", "\x1b[0m\n"):
        terminal.print(part)
        screen.draw(["the view"])
    found = terminal.lines()
    assert found[-4:] == ["100%two", "done", "", "the view"]


def test_view_grows_and_shrinks(terminal, screen):
    terminal.print("".join(f"line {number}\n" for number in range(25)))
    for height in (3, 5, 2):
        screen.draw([f"view {height}"] * height)
        found = terminal.lines()
        assert found[-height:] == [f"view {height}"] * height
        assert terminal.model.text().count("view") == height
    terminal.print("last\n")
    found = [line for line in terminal.model.text().splitlines() + terminal.lines() if line]
    assert [line for line in terminal.lines() if line][-3:] == ["last", "view 2", "view 2"]
    assert "line 24" in found


@pytest.mark.parametrize("size", [(60, 12), (60, 30), (30, 20), (100, 40)])
def test_a_resized_terminal_has_one_view(terminal, screen, size):
    terminal.print("".join(f"line {number}\n" for number in range(25)))
    screen.draw(["view a", "view b"])
    terminal.lines()
    terminal.resize(*size)
    screen.draw(["view c", "view d"])
    terminal.print("after\n")
    found = terminal.lines()
    assert found[-2:] == ["view c", "view d"]
    assert sum("view" in line for line in found) == 2
    assert "after" in found[:-2]
    assert "line 24" in terminal.model.text()


def test_closing_leaves_the_view_as_text_and_all_rows_scroll(terminal):
    screen = Screen(terminal.process.pid)
    terminal.print("before\n")
    screen.draw(["view"] * 4)
    screen.close(["the last", "view"])
    terminal.print("after\n")
    found = terminal.lines()
    assert [line for line in found if line] == ["before", "the last", "view", "after"]
    assert (terminal.model.first, terminal.model.last) == (0, 19)


def test_a_killed_process_leaves_a_terminal_that_scrolls(terminal):
    script = (
        "import os, sys\nfrom kaitian_mpi.observe.screen import Screen\n"
        "Screen(int(sys.argv[1])).draw(['the view', 'of a rank'])\nos.kill(os.getpid(), 9)"
    )
    terminal.print("before\n")
    died = subprocess.run([sys.executable, "-c", script, str(terminal.process.pid)], check=False)
    assert died.returncode == -signal.SIGKILL
    deadline = time.monotonic() + TIMEOUT_SEC
    terminal.read()
    while (terminal.model.first, terminal.model.last) != (0, 19):
        assert time.monotonic() < deadline
        time.sleep(0.01)
        terminal.read()
    terminal.print("after\n")
    terminal.read()
    found = [line for line in terminal.model.text().splitlines() if line]
    assert found == ["before", "the view", "of a rank", "after"]


def test_a_stopped_terminal_does_not_stop_the_training(terminal, screen):
    termios.tcflow(terminal.slave, termios.TCOOFF)  # as Ctrl-S does
    began = time.monotonic()
    for number in range(1000):
        screen.draw([f"view {number} {'x' * 50}"] * 10)
    assert time.monotonic() - began < TIMEOUT_SEC
    termios.tcflow(terminal.slave, termios.TCOON)
    terminal.read()
    screen.draw(["now"] * 10)
    assert terminal.lines()[-10:] == ["now"] * 10


def test_live_view_follows_readings_and_ends_with_the_run(terminal, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Screen(terminal.process.pid)
    view = LiveView(screen, terminal.process.pid, ViewState("run", {}), True)
    view.read(reading())
    found = terminal.lines()
    assert found[-8].startswith("run ──")
    assert "step 12/40" in found[-7]
    view.happened(event("finish"))
    terminal.print("after\n")
    found = [line for line in terminal.lines() if line]
    assert found[-1] == "after"
    assert "step 12/40" in found[1]
    view.close(True)
    assert capsys.readouterr().out == ""


def test_live_view_prints_lines_where_it_cannot_draw(terminal, capsys):
    screen = Screen(terminal.process.pid)
    view = LiveView(screen, terminal.process.pid, ViewState("run", {}), True)
    view.read(reading())
    assert terminal.lines()[-7]
    terminal.resize(20, 20)
    view.read(reading(step=13))
    assert not terminal.lines()[-7]
    assert "step 13/40" in capsys.readouterr().out
    terminal.resize(60, 20)
    view.read(reading(step=14))
    assert capsys.readouterr().out == ""
    view.close(False)


def test_without_colour_only_what_is_bold_or_dim_is_marked(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    view = LiveView(Screen(terminal.process.pid), terminal.process.pid, ViewState("run", {}), True)
    view.read(reading())
    raw = os.read(terminal.master, 65536).decode()
    assert "━" in raw
    assert "\x1b[3" not in raw
    assert "\x1b[?25l" not in raw  # the cursor stays visible
    view.close(False)


def test_an_output_that_is_not_a_terminal_is_refused(tmp_path):
    with (tmp_path / "log").open("w") as file, subprocess.Popen(["sleep", "60"], stdout=file) as p:
        with pytest.raises(NoTerminalError, match="a file or a pipe"):
            open_terminal(p.pid)
        p.kill()


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, "TERM"),
        ({"TERM": "dumb"}, "TERM"),
        ({"TERM": "xterm", "CI": "true"}, "CI job"),
        ({"TERM": "xterm", "JPY_PARENT_PID": "7"}, "notebook"),
        ({"TERM": "xterm", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1",
          "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpirun is not"),
    ],
)  # fmt: skip
def test_in_doubt_there_is_no_terminal(environ, reason, monkeypatch):
    monkeypatch.setattr("os.fstat", lambda _: os.stat_result((0o010600,) + (0,) * 9))  # a pipe
    with pytest.raises(NoTerminalError, match=reason):
        find_terminal(environ)


def test_quiet_and_none_show_nothing_and_a_file_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")

    def kind_of(**settings):
        return type(choice.open_progress(TrainingConfig(**settings), [], "run"))

    assert kind_of() is PlainProgress
    assert kind_of(progress="plain") is PlainProgress
    assert kind_of(progress="none") is MetricsSink
    assert kind_of(quiet=True, progress="live") is MetricsSink
