"""The live view of a run on the last rows of the terminal: bars, figures, and a row per rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.observe.reading import Event, Figures, Reading, duration, epoch_text
from kaitian_mpi.observe.sink import MetricsSink

_MAX_RANKS = 16
_OTHER_ROWS = 6  # title, two bars, figures, the table's head, and the row below the view
_MIN_SEC_BETWEEN = 0.5  # a drawing takes about 3 ms of the training thread
_BUSY = 0.9  # ranks below this share are yellow


class LiveProgress(MetricsSink):
    """Draws each reading and event. It needs no thread: nothing changes between readings.

    Lines printed by this process appear above the view; other ranks' lines may be overdrawn.
    """

    def __init__(
        self, title: str, infos: Sequence[RankInfo], console: Console | None = None
    ) -> None:
        self._title = title
        self._infos = {info.world_rank: info for info in infos}
        console = console or Console(force_terminal=True, force_interactive=True)
        self._live = Live(
            self,
            console=console,
            auto_refresh=False,
            redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="crop",
        )
        self._next_draw = 0.0
        self._reading: Reading | None = None
        self._held_out: dict[str, float] = {}
        self._slow: dict[int, str] = {}
        self._lost: list[int] = []

    def on_reading(self, reading: Reading) -> None:
        """Draw the reading, unless another was drawn a moment ago."""
        is_first = self._reading is None
        self._reading = reading
        if is_first:
            self._live.start()
            self._live.console.show_cursor()  # a process that is killed would leave it hidden
        if time.monotonic() >= self._next_draw:
            self._draw()

    def on_evaluation(self, evaluated: Figures) -> None:
        self._held_out = dict(evaluated.values)
        self._draw()

    def on_event(self, event: Event) -> None:
        """Draw the ranks that an event concerns; the run's last event ends the view."""
        if event.kind == "slow":
            self._slow |= dict.fromkeys(event.ranks, str(event.details.get("cause", "")))
        elif event.kind == "slow_end":
            self._slow = {rank: why for rank, why in self._slow.items() if rank not in event.ranks}
        elif event.kind == "loss":  # detection of slow ranks starts again
            self._slow = {}
            self._lost = sorted({*self._lost, *event.ranks})
        elif event.kind in ("finish", "stop"):
            self.close(finished=True)
            return
        self._draw()

    def close(self, finished: bool) -> None:
        """Stop drawing; the last view stays on the terminal."""
        if self._live.is_started:
            self._draw()
            self._live.stop()

    def _draw(self) -> None:
        if self._live.is_started:
            self._live.refresh()
            self._next_draw = time.monotonic() + _MIN_SEC_BETWEEN

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield the view, cropped to the terminal's size."""
        reading = self._reading
        assert reading is not None
        yield Text(printable(self._title), "bold", no_wrap=True, overflow="crop")
        yield _bars(reading)
        yield self._figures(reading, options.max_width)
        yield from self._ranks(reading, min(_MAX_RANKS, console.height - _OTHER_ROWS))
        yield Text()  # Open MPI's mpirun passes a row on only when it ends

    def _figures(self, reading: Reading, width: int) -> Text:
        """Return the line of figures, the most important first, and of the others what fits."""
        text = Text(no_wrap=True, overflow="crop")
        text.append(f"loss {reading.loss:.4f} | {reading.samples_per_sec:,.1f} samples/s")
        if self._lost:
            names = ", ".join(map(str, self._lost))
            text.append(f" | lost rank{'s' * (len(self._lost) > 1)} {names}", "bold yellow")
        others = [f"held-out {name} {value:.4f}" for name, value in self._held_out.items()]
        others += [f"{name} {value:.4g}" for name, value in reading.logged.items()]
        for other in (*others, f"learning rate {reading.learning_rate:.3g}"):
            shown = f" | {printable(other)}"
            if text.cell_len + cell_len(shown) <= width:  # else it would be cut amid a number
                text.append(shown)
        return text

    def _ranks(self, reading: Reading, most: int) -> Iterator[RenderableType]:
        table = Table(box=None, pad_edge=False, header_style="dim")
        names = ("host", "device", "kind")
        for name in ("rank", *names, "batch", "compute ms", "wait ms", "busy", ""):
            side: JustifyMethod = "left" if name in (*names, "") else "right"
            table.add_column(name, justify=side, no_wrap=True, overflow="crop")
        for place, rank in enumerate(reading.ranks[:most]):
            compute = reading.compute_time_sec[place]
            wait = reading.wait_time_sec[place]
            busy = min(1.0, compute / max(reading.step_time_sec, 1e-12))
            table.add_row(
                str(rank),
                *(getattr(self._infos[rank], name) for name in names),
                str(reading.batch_sizes[place]),
                f"{1e3 * compute:.1f}",
                f"{1e3 * wait:.1f}",
                Text(f"{busy:.0%}", "green" if busy >= _BUSY else "yellow"),
                Text(f"slow: {self._slow[rank]}" if rank in self._slow else "", "yellow"),
            )
        yield table
        if len(reading.ranks) > most:
            yield Text(f"and {len(reading.ranks) - most} more ranks", "dim")


def _bars(reading: Reading) -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    for ratio in (None, 1, None, None):
        table.add_column(ratio=ratio, justify="left" if ratio else "right", no_wrap=True)
    step = reading.step
    steps = reading.total_steps
    epoch = epoch_text(reading.epoch, reading.epochs)
    left = "" if reading.seconds_left is None else f"{duration(reading.seconds_left)} left"
    for name, fraction, end in (
        (epoch, reading.epoch_fraction, f"step {step}/{steps}"),
        ("run", step / max(1, steps), left),
    ):
        done = min(1.0, fraction)
        table.add_row(name, ProgressBar(total=1.0, completed=done), f"{done:.0%}", end)
    return table


def printable(text: str) -> str:
    """Return a text without characters that would move the cursor."""
    return "".join(char if char.isprintable() else "?" for char in text)
