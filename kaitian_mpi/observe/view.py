"""What the live view shows, as text: bars, figures, and a row for each rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.text import Text

from kaitian_mpi.observe.reading import Evaluated, Event, Reading

MIN_HEIGHT = 4  # the title, two bars, and the figures
_BUSY = 0.9  # ranks below this share are drawn in yellow
_BAR_WIDTH = 12
_MAX_REMARK = 21  # the width of the longest known cause


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    host: str
    device: str
    kind: str


@dataclass(frozen=True)
class RankRow:
    """What the view shows of a rank; times are means per step, in seconds."""

    rank: int
    batch_size: int
    compute_sec: float
    wait_sec: float
    busy: float
    """The share of the step in which it computes, from 0 to 1."""
    remark: str = ""
    """For example, why it is slow."""


@dataclass(frozen=True)
class ViewState:
    """Everything that the view shows."""

    title: str
    places: Mapping[int, Place]
    """Where each rank is, by world rank."""
    reading: Reading | None = None
    held_out: Mapping[str, float] = field(default_factory=dict)
    """The results of the last evaluation, by name."""
    slow: Mapping[int, str] = field(default_factory=dict)
    """Why a rank is slow, by world rank."""
    lost: Sequence[int] = ()
    """The world ranks that were lost."""

    def with_evaluation(self, evaluated: Evaluated) -> ViewState:
        """Return this with the results of an evaluation."""
        return replace(self, held_out=evaluated.values)

    def with_event(self, event: Event) -> ViewState:
        """Return this with what an event says about ranks."""
        concerned = set(event.ranks)
        if event.kind == "slow":
            cause = str(event.details.get("cause", "slow"))
            return replace(self, slow={**self.slow, **dict.fromkeys(event.ranks, cause)})
        if event.kind == "slow_end":
            left = {rank: cause for rank, cause in self.slow.items() if rank not in concerned}
            return replace(self, slow=left)
        if event.kind == "loss":  # the search for slow ranks starts again
            return replace(self, slow={}, lost=sorted({*self.lost, *concerned}))
        return self

    def rows(self) -> list[RankRow]:
        """Return a row for each rank that trains."""
        reading = self.reading
        if reading is None:
            return []
        step_sec = max(reading.step_time_sec, 1e-12)
        of_ranks = (reading.ranks, reading.batch_sizes)
        times = (reading.compute_time_sec, reading.wait_time_sec)
        return [
            RankRow(
                *(rank, batch, compute, wait, min(1.0, compute / step_sec)),
                remark=self.slow.get(rank, ""),
            )
            for rank, batch, compute, wait in zip(*of_ranks, *times, strict=True)
        ]


def render(state: ViewState, width: int, height: int, unicode: bool = True) -> Group:
    """Return the view, with no line longer than the width.

    Args:
        state: what it shows.
        width: in columns, at least 32.
        height: the maximum number of lines, at least `MIN_HEIGHT`; if not all ranks fit, the
            slowest are shown.
        unicode: whether the terminal has more characters than ASCII.
    """
    if state.reading is None:
        return Group(_title(state, width, unicode))
    lines = [
        _title(state, width, unicode),
        *_bars(state.reading, width, unicode),
        _figures(state, width),
    ]
    room = height - MIN_HEIGHT - 1  # the table's head
    if room > 0:
        lines += _ranks(state, width, room, unicode)
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis" if unicode else "crop")
    return Group(*lines)


def duration(seconds: float) -> str:
    """Format a duration: `0:07`, `12:34`, `3:07:09`."""
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def printable(text: str) -> str:
    """Return a text without characters that would move the cursor."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _title(state: ViewState, width: int, unicode: bool) -> Text:
    title = printable(state.title)
    line = ("─" if unicode else "-") * max(0, width - cell_len(title) - 1)
    return Text.assemble((title, "bold"), " ", (line, "dim"))


def _bars(reading: Reading, width: int, unicode: bool) -> list[Text]:
    shown = min(reading.epoch + 1, reading.epochs)
    names = f"epoch {shown}/{reading.epochs}", "run"
    ends = (
        f"step {reading.step}/{reading.total_steps}",
        f"{duration(reading.seconds_left)} left",
    )
    fractions = reading.epoch_fraction, reading.step / max(1, reading.total_steps)
    before, after = max(map(len, names)), max(map(len, ends))
    bar_width = max(0, width - before - after - 8)  # of "100%", and blanks
    return [
        Text.assemble(
            f"{name:<{before}} ",
            _bar(fraction, bar_width, "cyan", unicode),
            f" {min(1.0, fraction):>4.0%}  {end:>{after}}",
        )
        for name, fraction, end in zip(names, fractions, ends, strict=True)
    ]


def _bar(fraction: float, width: int, style: str, unicode: bool) -> Text:
    """Return a bar of fixed width; its two parts differ in more than color."""
    full, rest = "━─" if unicode else "#-"
    filled = round(min(1.0, max(0.0, fraction)) * width)
    return Text.assemble((full * filled, style), (rest * (width - filled), "dim"))


def _figures(state: ViewState, width: int) -> Text:
    """Return the line of figures, leaving out those that do not fit."""
    reading = state.reading
    assert reading is not None
    figures = [f"loss {reading.loss:.4f}", f"{reading.samples_per_sec:,.1f} samples/s"]
    # Accuracy first: it is what people look for.
    names = sorted(state.held_out, key=lambda name: name != "accuracy")
    lost = f"lost rank{'s' * (len(state.lost) > 1)} {', '.join(map(str, state.lost))}"
    figures += [lost] if state.lost else []
    figures += [f"held-out {name} {state.held_out[name]:.4f}" for name in names]
    figures += [f"{name} {value:.4g}" for name, value in reading.logged.items()]
    figures.append(f"learning rate {reading.learning_rate:.3g}")
    line = figures[0]
    for figure in figures[1:]:
        if cell_len(line) + 3 + cell_len(figure) <= width:
            line += f" | {figure}"
    text = Text(printable(line))
    text.highlight_words([lost], "bold yellow")
    return text


@dataclass(frozen=True)
class _Column:
    name: str
    cells: Sequence[str]
    drop_order: int
    """If not all columns fit, those with the highest are left out first; 0 is always shown."""
    is_number: bool = False

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.name, *self.cells)))

    def align(self, text: str) -> str:
        if self.is_number:
            return text.rjust(self.width)
        return set_cell_size(text, self.width)


def _ranks(state: ViewState, width: int, room: int, unicode: bool) -> list[Text]:
    rows = state.rows()
    shown = rows
    if len(rows) > room:
        slowest = sorted(rows, key=lambda row: row.compute_sec, reverse=True)[: room - 1]
        shown = sorted(slowest, key=lambda row: row.rank)
    remarks = [f"  slow: {printable(row.remark)}" if row.remark else "" for row in shown]
    room_for_remarks = min(_MAX_REMARK, max(map(cell_len, remarks)))
    columns = _fitting(_columns(state, shown), width - room_for_remarks)
    names = "  ".join(column.align(column.name) for column in columns)
    has_bar = cell_len(names) + 2 + _BAR_WIDTH + room_for_remarks <= width
    lines = [Text(names, "dim")]
    for index, row in enumerate(shown):
        texts = "  ".join(column.align(column.cells[index]) for column in columns)
        line = Text(texts, "yellow" if row.remark else "")
        if has_bar:
            style = "green" if row.busy >= _BUSY else "yellow"
            line = Text.assemble(line, "  ", _bar(row.busy, _BAR_WIDTH, style, unicode))
        line.append(remarks[index], "yellow")
        lines.append(line)
    rest = [row for row in rows if row not in shown]
    if rest:
        least, most = min(row.busy for row in rest), max(row.busy for row in rest)
        dots = "…" if unicode else "..."
        text = f"{dots} and {len(rest)} faster ranks, busy {least:.0%} to {most:.0%}"
        lines.append(Text(text, "dim"))
    return lines


def _columns(state: ViewState, rows: Sequence[RankRow]) -> list[_Column]:
    places = [state.places.get(row.rank, Place("?", "?", "?")) for row in rows]
    hosts, devices, kinds = (
        [printable(getattr(place, name)) for place in places] for name in ("host", "device", "kind")
    )
    return [
        _Column("rank", [str(row.rank) for row in rows], 0, True),
        _Column("host", hosts, 5),
        _Column("device", devices, 4),
        _Column("kind", kinds, 2),
        _Column("batch", [str(row.batch_size) for row in rows], 1, True),
        _Column("compute ms", [f"{1e3 * row.compute_sec:.1f}" for row in rows], 3, True),
        _Column("wait ms", [f"{1e3 * row.wait_sec:.1f}" for row in rows], 3, True),
        _Column("busy", [f"{row.busy:.0%}" for row in rows], 0, True),
    ]


def _fitting(columns: list[_Column], width: int) -> list[_Column]:
    """Return the columns that fit."""
    while sum(column.width + 2 for column in columns) - 2 > width:
        dropped = max(column.drop_order for column in columns)
        if dropped == 0:
            break
        columns = [column for column in columns if column.drop_order != dropped]
    return columns
