"""The watchdog's own process, which ends a rank that hangs.

Started by `watchdog.py`, by path and without site packages, and sparing with the standard library
(no typing, no contextlib), so that it is up in 15 ms and small::

    python -I -S watchdog_process.py kaitian-watchdog NAME RANK_PID LAUNCHER_PID < pipe

A LAUNCHER_PID of 0 is not watched.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

_LONGEST_NAP_SEC = 1.0
_NAPS_PER_LIMIT = 10
_WAITING_EXTRA_SEC = 5.0
_MESSAGE_SEC = 0.5
_READ_BYTES = 1 << 18
_LONGEST_LINE = 4096
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STATES = {"T": "stopped", "t": "held by a debugger", "D": "blocked in the kernel"}
_OTHER_STATE = "alive, but one call does not let go of the interpreter"


class Report:
    """What one line of the rank says; moments are seconds of CLOCK_MONOTONIC.

    Each line says all, so that lines may be lost.

    Attributes:
        beat: when the line was written, a sign of life.
        serial: the higher, the newer is what follows.
        limit: seconds that a phase may last.
        since: when the phase began.
        waits: whether the rank waits for others, and so is not itself to blame.
        limited: whether the phase has a limit of time at all.
        where: the phase in words, with its step.
    """

    def __init__(self, line: bytes) -> None:
        beat, serial, limit, since, waits, limited, step, phase = line.split(b" ", 7)
        self.beat, self.serial = float(beat), int(serial)
        self.limit, self.since = float(limit), float(since)
        self.waits, self.limited = waits == b"1", limited == b"1"
        words = phase + b" of step " + step if step else phase
        self.where = words.decode(errors="replace")
        if not self.limit > 0:
            raise ValueError(f"found a limit of {self.limit} s, needed a positive one")

    @property
    def nap(self) -> float:
        """Seconds between two looks at the rank."""
        return min(_LONGEST_NAP_SEC, self.limit / _NAPS_PER_LIMIT)


def updated(known: Report | None, lines: list[bytes]) -> Report | None:
    """Return what is known after some more lines; what is no report is passed over.

    The last two lines hold all: one thread writes the phases and one the beats, so that at most
    the very last line, a beat, tells of a phase that is over.
    """
    for line in lines[-2:]:
        try:
            heard = Report(line)
        except ValueError:
            continue
        if known is not None:
            heard.beat = known.beat = max(known.beat, heard.beat)
        if known is None or heard.serial > known.serial:
            known = heard
    return known


def judge(now: float, report: Report, anew: float, state: str = "") -> str | None:
    """Return why the rank has to be ended, or None.

    Args:
        now: the time by CLOCK_MONOTONIC, in seconds.
        report: the newest of the rank.
        anew: when all clocks were set anew; what was before does not count.
        state: the rank's state in /proc, for the words alone.
    """
    silent = now - max(report.beat, anew)
    lasted = now - max(report.since, anew)
    if silent > report.limit:
        how = _STATES.get(state, _OTHER_STATE)
        return f"no sign of life for {seconds(silent)} ({how}), last in {report.where}"
    if not report.limited:
        return None
    if not report.waits and lasted > report.limit:
        limit = seconds(report.limit)
        return f"{seconds(lasted)} in {report.where}, the limit is {limit} (--step-timeout)"
    # Whoever the others wait for is ended by its own watchdog: after that time there is none.
    if report.waits and lasted > 2 * report.limit + _WAITING_EXTRA_SEC:
        return (
            f"{seconds(lasted)} waiting for other ranks in {report.where}: a link or a host is gone"
        )
    return None


def overslept(slept: float, asked: float, limit: float) -> bool:
    """Return whether this process itself was stopped: the rank may have been as well.

    By Ctrl-Z, or with its virtual machine. What goes unseen here is less than the limit.
    """
    return slept > 2 * asked + min(1.0, limit / 2)


def seconds(value: float) -> str:
    """Return seconds in words: `0.6 s`, `61 s`."""
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def parse_stat(stat: bytes) -> tuple[str, int]:
    """Return a process's state and its parent, of its /proc/PID/stat.

    The program's name there, in brackets, may hold anything, even brackets.
    """
    state, parent = stat.rpartition(b")")[2].split()[:2]
    return state.decode(), int(parent)


class Pipe:
    """The reading end: whole lines, without waiting for them."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._rest = b""
        self._poll = select.poll()
        # No event asked for: only the pipe's end wakes, not each of a thousand lines a second.
        self._poll.register(descriptor, 0)

    def nap(self, nap_sec: float) -> None:
        """Sleep for this time, or until the pipe ends."""
        self._poll.poll(nap_sec * 1000)

    def read_lines(self) -> list[bytes] | None:
        """Return the lines that are there; None at the pipe's end."""
        text = self._rest
        try:
            while chunk := os.read(self._descriptor, _READ_BYTES):
                text += chunk
        except BlockingIOError:
            *lines, rest = text.split(b"\n")
            self._rest = rest[-_LONGEST_LINE:]
            return lines
        return None


class Watch:
    """Looks after one rank, this process's parent."""

    def __init__(self, name: str, rank: int, launcher: int, pipe: Pipe) -> None:
        self._name, self._rank, self._launcher, self._pipe = name, rank, launcher, pipe
        self._report: Report | None = None
        self._looked = self._anew = time.monotonic()
        self._nap = 0.0

    def run(self) -> None:
        """Return when the rank has ended, by itself or by this watch."""
        while self._rank_lives():
            reason = self._look()
            if reason:
                self._end_rank(reason)
                return

    def _rank_lives(self) -> bool:
        """Sleep and listen; return whether there is still a rank."""
        self._pipe.nap(self._nap)
        # Before the reading: if this process is stopped right here, the rank seems the younger.
        now = time.monotonic()
        lines = self._pipe.read_lines()
        # A forked worker of the rank may hold the pipe's other end open.
        if lines is None or os.getppid() != self._rank:
            return False
        self._report = updated(self._report, lines)
        slept, self._looked = now - self._looked, now
        if self._report and overslept(slept, self._nap, self._report.limit):
            self._anew = now
        return True

    def _look(self) -> str | None:
        """Return why the rank has to be ended, or None."""
        if self._report is None:
            self._nap = _LONGEST_NAP_SEC / _NAPS_PER_LIMIT
            return None
        self._nap = self._report.nap
        state, launcher = self._read_stat()
        if self._launcher and launcher != self._launcher:
            return f"its launcher is gone, last in {self._report.where}"
        return judge(self._looked, self._report, self._anew, state)

    def _read_stat(self) -> tuple[str, int]:
        try:
            with open(f"/proc/{self._rank}/stat", "rb") as file:
                return parse_stat(file.read())
        except (OSError, ValueError):
            return "", self._launcher

    def _end_rank(self, reason: str) -> None:
        self._say(f"{self._name} ended by its watchdog: {reason}\n")
        # The number of a process that has ended may by now be another's.
        if os.getppid() == self._rank:
            os.kill(self._rank, signal.SIGKILL)

    def _say(self, line: str) -> None:
        """Write to stderr, unless nobody reads there: the rank has to end all the same."""
        try:
            if select.select([], [2], [], _MESSAGE_SEC)[1]:
                os.write(2, line.encode(errors="surrogateescape"))
        except (OSError, ValueError):
            return


def _name_process(name: str) -> None:
    try:
        with open("/proc/self/comm", "w") as file:
            file.write(name)
    except OSError:
        return


def main(program: str, name: str, rank: str, launcher: str) -> None:
    """Watch the rank until it ends."""
    # A rank that does not heed the launcher's signals is just what needs a watchdog.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    _name_process(program)
    Watch(name, int(rank), int(launcher), Pipe(0)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
