"""Shows a run's progress as plain lines or a live view, and a summary of three lines at its end."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.observe.reading import Event, Figures, Reading, duration, epoch_text
from kaitian_mpi.observe.sink import MetricsSink

_log = logging.getLogger(__name__)

_MIN_COLUMNS = 72
_MIN_ROWS = 10
_MIN_SHOWN = 0.005
_MIN_ADVISED = 0.1
_ADVICE = {
    "slower ranks": "ranks wait for slower ones: kaitian-plan shows what each kind contributes",
    "communication": "communication takes most of the remaining time: a larger "
    "--global-batch-size reduces it",
    "stages waiting for each other": "stages wait for each other: a larger --global-batch-size "
    "gives more micro-batches and less waiting",
    "ranks waiting for tokens": "ranks wait for each other's tokens: a larger "
    "--global-batch-size gives more to compute while they travel",
    "loading data": "loading data takes most of the remaining time: set --workers to load it in "
    "background processes",
    "time between steps": "the time between steps, for the script's own code or checks, takes most "
    "of the remaining time",
}
_ADVICE_ON_LINKS = ", and --wire sends fewer bits between hosts"


class PlainProgress(MetricsSink):
    """Prints a line for each reading."""

    def on_reading(self, reading: Reading) -> None:
        parts = [
            epoch_text(reading.epoch, reading.epochs),
            f"step {reading.step}/{reading.total_steps}",
            f"loss {reading.loss:.4f}",
            f"{reading.samples_per_sec:.1f} samples/s",
        ]
        if reading.seconds_left is not None:
            parts.append(f"{duration(reading.seconds_left)} left")
        parts += [f"{name} {value:.4g}" for name, value in reading.logged.items()]
        print(" | ".join(parts), flush=True)


def open_progress(config: TrainingConfig, infos: Sequence[RankInfo], title: str) -> MetricsSink:
    """Return the sink that shows the progress; call it on the rank that writes the files."""
    if config.quiet or config.progress == "none":
        return MetricsSink()
    if config.progress == "live" and _can_draw():
        from kaitian_mpi.observe.live import LiveProgress  # rich is slow to import

        return LiveProgress(title, infos)
    if config.progress == "live":
        _log.warning(
            "printing plain lines instead of a live view, which needs mpirun's output to be a "
            "terminal of at least %d columns and %d rows that can move its cursor (TERM)",
            _MIN_COLUMNS,
            _MIN_ROWS,
        )
    return PlainProgress()


def _can_draw() -> bool:
    """Return whether a live view can be drawn on stdout.

    Open MPI gives every rank a pseudo terminal, even if mpirun's output goes to a file. The pseudo
    terminal has a size only if mpirun's output is a terminal.
    """
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return False
    columns, rows = os.get_terminal_size(sys.stdout.fileno())
    return columns >= _MIN_COLUMNS and rows >= _MIN_ROWS


class Outcome(MetricsSink):
    """Prints three lines when the run finishes: its results, the use of the devices, and advice.

    The use of the devices is measured in the run itself. A rank that takes c seconds to compute its
    b samples would reach b / c samples/s alone, without waiting and without communication. The
    job's throughput is divided by the sum of these rates. The difference to 1 is the time that the
    ranks spent on anything else, weighted by b / c. (A rank's `compute` includes any slowdown, so
    this does not show whether a device is as fast as it should be; slow ranks are named.)
    """

    def __init__(
        self,
        folder: str,
        emulated: bool,
        waits_within: str = "",
        crosses_hosts: bool = False,
        word: Callable[[str], str] = str,
    ) -> None:
        """Start without readings.

        Args:
            folder: the run folder; "" without one.
            emulated: whether device kinds or speeds are emulated.
            waits_within: what ranks wait for within a step, if each computes a part of all samples;
                a cause with advice.
            crosses_hosts: whether gradients cross between hosts, in a format that can be shortened.
            word: translates advice that names flags for scripts that have no such flags.
        """
        self._folder = folder
        self._emulated = emulated
        self._waits_within = waits_within
        self._crosses_hosts = crosses_hosts
        self._word = word
        self._computing = 0.0
        """The time in which the ranks computed, in samples."""
        self._spent = dict.fromkeys(_ADVICE, 0.0)
        """The other time by cause, in samples."""
        self._samples = 0.0
        self._seconds = 0.0
        self._first: Event | None = None
        self._reading: Reading | None = None
        self._held_out: Mapping[str, float] = {}
        self._lost: list[Event] = []
        self._slow: dict[int, Event] = {}

    def on_reading(self, reading: Reading) -> None:
        """Add up the ranks' time by cause."""
        self._reading = reading
        steps = reading.steps
        step_sec = reading.step_time_sec
        self._samples += reading.samples_per_sec * step_sec * steps
        self._seconds += step_sec * steps
        # The last rank to arrive waits for communication alone.
        exchange = min(reading.wait_time_sec)
        batches: Sequence[float] = reading.batch_sizes
        if self._waits_within:  # each rank's fraction of the work, in samples
            total_sec = sum(reading.compute_time_sec) or 1.0
            batches = [sum(batches) * sec / total_sec for sec in reading.compute_time_sec]
        for batch, compute, wait, load in zip(
            batches,
            reading.compute_time_sec,
            reading.wait_time_sec,
            reading.data_time_sec,
            strict=True,
        ):
            if batch <= 0 or compute <= 0:
                continue
            self._computing += batch * steps
            rest = max(0.0, step_sec - compute - wait - load)
            seconds = {"loading data": load, "time between steps": rest}
            if self._waits_within:
                seconds[self._waits_within] = wait
            else:
                seconds |= {"slower ranks": wait - exchange, "communication": exchange}
            for cause, spent in seconds.items():
                self._spent[cause] += batch / compute * steps * spent

    def on_evaluation(self, evaluated: Figures) -> None:
        self._held_out = evaluated.values

    def on_event(self, event: Event) -> None:
        if event.kind in ("start", "resume"):
            self._first = self._first or event
        elif event.kind == "loss":
            self._lost.append(event)
        elif event.kind == "slow":
            self._slow.update(dict.fromkeys(event.ranks, event))
        elif event.kind == "slow_end":
            for rank in event.ranks:
                self._slow.pop(rank, None)
        elif event.kind == "finish":
            print("\n".join(self.lines(event)), flush=True)

    def lines(self, finish: Event) -> list[str]:
        """Return the three lines, with a fourth about lost and slow ranks, if any."""
        slow = list(self._slow.values())
        notes = [event.text for event in self._lost + slow[-1:]]
        lines = [self._results(finish), self._use()]
        if notes:
            lines.append(f"note: {'; '.join(notes)}")
        lines.append(f"next: {self._advice(needs_advice=not notes)}")
        return lines

    def _results(self, finish: Event) -> str:
        figures = [finish.text]
        if self._first is not None:
            resumed = f" from step {self._first.step}" if self._first.kind == "resume" else ""
            figures[0] += f", in {duration(finish.time - self._first.time)}{resumed}"
        if self._reading is not None:
            figures.append(f"loss {self._reading.loss:.4f}")
        figures += [f"held-out {name} {value:.4f}" for name, value in self._held_out.items()]
        return " | ".join(figures)

    def _losses(self) -> list[tuple[str, float]]:
        """Return the lost shares by cause, largest first; the used share is the rest to 1."""
        capacity = self._computing + sum(self._spent.values())
        shares = {name: samples / capacity for name, samples in self._spent.items()}
        return sorted(shares.items(), key=lambda item: -item[1])

    def _use(self) -> str:
        if not (self._computing and self._seconds):
            return "devices: not measured, because no step was trained"
        losses = self._losses()
        share = 1 - sum(lost for _, lost in losses)
        rate = self._samples / self._seconds
        emulated = " (emulated)" if self._emulated else ""
        text = (
            f"devices{emulated}: {share:.0%} of their combined speed ({rate:,.1f} of "
            f"{rate / share:,.1f} samples/s)"
        )
        other = sum(lost for _, lost in losses[2:])
        shown = [*losses[:2], ("other", other)]
        named = [f"{name} {lost:.0%}" for name, lost in shown if lost >= _MIN_SHOWN]
        return f"{text}; lost to {', '.join(named)}" if named else text

    def _advice(self, needs_advice: bool) -> str:
        advice = []
        if needs_advice and self._computing:
            name, share = self._losses()[0]
            links = _ADVICE_ON_LINKS if self._crosses_hosts and name == "communication" else ""
            advice += [_ADVICE[name] + links] if share >= _MIN_ADVISED else []
        if self._folder:
            advice.append(f"kaitian-report {self._folder} shows the run")
        elif not advice:
            advice.append("use --run-dir to keep the weights, metrics and checkpoints")
        return self._word("; ".join(advice))


def resume_line(step: int, total_steps: int, settings: str) -> str:
    """Return the line that says how to continue a run that is saved but not finished."""
    return f"stopped after step {step} of {total_steps}; to continue, run the same with {settings}"
