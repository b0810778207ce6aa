"""The watchdog process: kills a rank that hangs. Starts in 15 ms by importing little."""

from __future__ import annotations

import os
import select
import signal
import sys
import time

_MAX_NAP_SEC = 1.0
_NAPS_PER_LIMIT = 10
_WAITING_EXTRA_SEC = 5.0
_MESSAGE_SEC = 0.5
_READ_BYTES = 1 << 18
_MAX_LINE_BYTES = 4096
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOPPED = "T"
_STATES = {_STOPPED: "stopped", "t": "stopped by a debugger", "D": "blocked in the kernel"}
_OTHER_STATE = "running, but a call holds the GIL"


class Heartbeat:
    """One line from the rank: its heartbeat and phase. Times are seconds of CLOCK_MONOTONIC."""

    def __init__(self, line: bytes) -> None:
        *numbers, waits, step, phase = line.split(b" ", 6)
        self.beat, self.limit, self.since, self.allowed = map(float, numbers)
        self.waits = waits == b"1"
        words = phase + b" of step " + step if step else phase
        self.where = words.decode(errors="replace")
        if not self.limit > 0:
            raise ValueError(f"a limit of {self.limit} s is not positive")


def newest_report(known: Heartbeat | None, lines: list[bytes]) -> Heartbeat | None:
    """Return the newest report after reading more lines; malformed lines are ignored."""
    try:
        return Heartbeat(lines[-1]) if lines else known
    except ValueError:
        return known


def kill_reason(
    now: float,
    report: Heartbeat,
    restarted: float,
    state: str = "",
    stopped_limit: float = float("inf"),
) -> str | None:
    """Return the reason to kill the rank, or None.

    A stopped rank does not continue by itself, unlike one that loads or compiles, so it may have
    a limit of its own.
    """
    silent = now - max(report.beat, restarted)
    lasted = now - max(report.since, restarted)
    may_be_silent = min(report.limit, stopped_limit) if state == _STOPPED else report.limit
    if silent > may_be_silent:
        how = _STATES.get(state, _OTHER_STATE)
        return f"no heartbeat for {seconds(silent)} ({how}), last in {report.where}"
    if report.allowed == float("inf"):
        return None
    if not report.waits and lasted > report.allowed:
        how = f" ({_STATES[state]})" if state in _STATES else ""
        limit = seconds(report.allowed)
        return f"{seconds(lasted)} in {report.where}{how}, the limit is {limit} (--step-timeout)"
    # Other ranks that hang were killed by their watchdogs before, so nothing will arrive.
    if report.waits and lasted > 2 * report.limit + _WAITING_EXTRA_SEC:
        return (
            f"{seconds(lasted)} waiting for other ranks in {report.where}: a host or link is down"
        )
    return None


def seconds(value: float) -> str:
    """Format seconds: `0.6 s`, `61 s`."""
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def parse_stat(stat: bytes) -> tuple[str, int]:
    """Return a process's state and its parent's pid from its /proc/PID/stat."""
    state, parent = stat.rpartition(b")")[2].split()[:2]
    return state.decode(), int(parent)


class Watch:
    """Watches one rank, this process's parent, which writes to `pipe`."""

    def __init__(
        self, name: str, rank: int, launcher: int, stopped_limit: float, pipe: int
    ) -> None:
        self._name = name
        self._rank = rank
        self._launcher = launcher
        self._stopped_limit = stopped_limit
        self._pipe = pipe
        self._rest = b""
        os.set_blocking(pipe, False)
        self._poll = select.poll()
        # No event requested: a closed pipe wakes this process, not each of 1,000 lines a second.
        self._poll.register(pipe, 0)

    def run(self) -> None:
        """Watch until the rank has exited or been killed."""
        report = None
        nap = 0.0
        reason = None
        checked = restarted = time.monotonic()
        while reason is None:
            self._poll.poll(nap * 1000)
            # Read before the lines: if this process is stopped here, the rank only seems newer.
            now = time.monotonic()
            lines = self._read_lines()
            # A forked worker of the rank may hold the pipe's other end open.
            if lines is None or os.getppid() != self._rank:
                return
            report = newest_report(report, lines)
            slept = now - checked
            checked = now
            if report is None:
                nap = _MAX_NAP_SEC / _NAPS_PER_LIMIT
                continue
            # This process itself was stopped, as by Ctrl-Z or with its virtual machine.
            if slept > 2 * nap + min(1.0, report.limit / 2):
                restarted = now
            limit = min(report.limit, self._stopped_limit)
            nap = min(_MAX_NAP_SEC, limit / _NAPS_PER_LIMIT)
            reason = self._reason_to_kill(now, report, restarted)
        self._kill_rank(reason)

    def _read_lines(self) -> list[bytes] | None:
        text = self._rest
        try:
            while chunk := os.read(self._pipe, _READ_BYTES):
                text += chunk
        except BlockingIOError:
            *lines, rest = text.split(b"\n")
            self._rest = rest[-_MAX_LINE_BYTES:]
            return lines
        return None

    def _reason_to_kill(self, now: float, report: Heartbeat, restarted: float) -> str | None:
        state = ""
        launcher = self._launcher
        try:
            with open(f"/proc/{self._rank}/stat", "rb") as file:
                state, launcher = parse_stat(file.read())
        except (OSError, ValueError):
            pass
        if self._launcher and launcher != self._launcher:
            return f"its launcher has exited, last in {report.where}"
        return kill_reason(now, report, restarted, state, self._stopped_limit)

    def _kill_rank(self, reason: str) -> None:
        try:
            # The rank must be killed in any case, even if stderr blocks.
            if select.select([], [2], [], _MESSAGE_SEC)[1]:
                text = f"{self._name} killed by its watchdog: {reason}\n"
                os.write(2, text.encode(errors="surrogateescape"))
        except (OSError, ValueError):
            pass
        # The pid of a process that has exited may have been reused.
        if os.getppid() == self._rank:
            os.kill(self._rank, signal.SIGKILL)


def main(program: str, name: str, rank: str, launcher: str, stopped_limit: str) -> None:
    """Watch the rank with this pid until it ends, and its launcher unless its pid is 0."""
    # A rank that ignores the launcher's signals is exactly what needs a watchdog.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    try:
        with open("/proc/self/comm", "w") as file:
            file.write(program)
    except OSError:
        pass
    Watch(name, int(rank), int(launcher), float(stopped_limit), 0).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
