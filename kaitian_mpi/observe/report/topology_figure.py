"""The figure of hosts, ranks by kind, leaders, and what connects them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kaitian_mpi.observe.report import palette
from kaitian_mpi.observe.report.canvas import SMALL, new_figure
from kaitian_mpi.observe.report.run import Rank, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

_MAX_COLUMNS = 5
_MAX_SQUARES = 12
"""Ranks of one kind on one host that are drawn one by one."""
_LEFT, _RIGHT = 1.35, 1.75  # inches beside the hosts
_BESIDE = _LEFT + _RIGHT
_MIN_WIDTH = 5.6  # of the key, in inches
_SQUARE, _GAP = 0.36, 0.1
_HEAD = 0.42


@dataclass(frozen=True)
class Column:
    """A host, or several that have the same ranks of each kind."""

    hosts: tuple[str, ...]
    ranks: tuple[Rank, ...]
    """Of the first host."""

    @property
    def name(self) -> str:
        """What to write above it."""
        first = self.hosts[0] or "unknown host"
        if len(self.hosts) == 1:
            return first if len(first) <= 24 else first[:23] + "…"
        return f"{first[:14]} and {len(self.hosts) - 1:,} alike"


def columns(run: Run) -> list[Column]:
    """Return the hosts; where there are many, those with the same ranks as one."""
    by_host: dict[str, list[Rank]] = {}
    for rank in run.ranks.values():
        by_host.setdefault(rank.host, []).append(rank)
    if len(by_host) <= _MAX_COLUMNS:
        return [Column((host,), tuple(ranks)) for host, ranks in by_host.items()]
    alike: dict[frozenset[tuple[str, int]], list[str]] = {}
    for host, ranks in by_host.items():
        kinds = Counter(rank.kind for rank in ranks)
        alike.setdefault(frozenset(kinds.items()), []).append(host)
    merged = sorted(alike.values(), key=len, reverse=True)
    return [Column(tuple(hosts), tuple(by_host[hosts[0]])) for hosts in merged]


def draw_topology(run: Run) -> Figure | None:
    """Draw the hosts as boxes with their ranks, in a row for each kind."""
    if not run.ranks:
        return None
    every = columns(run)
    shown = every[:_MAX_COLUMNS]
    figure = new_figure("Ranks, hosts and links", run, 1)
    figure.set_figwidth(max(figure.get_figwidth(), _MIN_WIDTH, _BESIDE + 1.3 * len(shown)))
    width = (figure.get_figwidth() - _BESIDE) / len(shown) - 0.15
    per_row = max(1, int((width - 0.2) / (_SQUARE + _GAP)))
    kinds = list(dict.fromkeys(rank.kind for rank in run.ranks.values()))
    heights = [_band_height(shown, kind, per_row) for kind in kinds]
    total = sum(heights) + _HEAD + 0.75
    figure.set_figheight(total + 0.4)
    figure.set_layout_engine("none")  # all places are in inches
    axes = figure.add_axes((0, 0, 1, total / (total + 0.4)))
    axes.set_axis_off()
    axes.set_xlim(0, figure.get_figwidth())
    axes.set_ylim(0, total)
    top = total - _HEAD
    tops = [top - sum(heights[:i]) for i in range(len(kinds))]
    bottom = top - sum(heights)
    _draw_links(axes, run, kinds, tops, heights, len(shown), width)
    for place, column in enumerate(shown):
        left = _LEFT + place * (width + 0.15)
        _box(axes, left, bottom, width, top - bottom + _HEAD - 0.06, "none", palette.TEXT, 1.4)
        axes.text(left + width / 2, top + 0.16, column.name, ha="center", va="center", fontsize=10)
        for kind, band_top, height in zip(kinds, tops, heights, strict=True):
            ranks = [rank for rank in column.ranks if rank.kind == kind]
            _draw_cell(axes, run, ranks, kinds, (left, band_top - height, width, height), per_row)
    _draw_key(axes, run, len(every) - len(shown))
    return figure


def _band_height(shown: Sequence[Column], kind: str, per_row: int) -> float:
    most = max(sum(rank.kind == kind for rank in column.ranks) for column in shown)
    rows = 1 if most > _MAX_SQUARES else max(1, -(-most // per_row))
    return rows * (_SQUARE + _GAP) + 0.5


def _draw_cell(
    axes: Axes,
    run: Run,
    ranks: Sequence[Rank],
    kinds: Sequence[str],
    box: tuple[float, float, float, float],
    per_row: int,
) -> None:
    """Draw the ranks of one kind on one host."""
    if not ranks:
        return
    left, bottom, width, height = box
    fill = palette.kind_fill(ranks[0].kind, kinds)
    _box(axes, left + 0.07, bottom + 0.06, width - 0.14, height - 0.12, fill.color, palette.MUTED)
    name = ("emulated on " if ranks[0].emulated else "") + (ranks[0].device_name or ranks[0].device)
    name = _short(name, int(width * 12))
    axes.text(
        left + width / 2, bottom + 0.18, name, ha="center", va="center", fontsize=SMALL
    )  # fmt: skip
    top = bottom + height - 0.12
    if len(ranks) > _MAX_SQUARES:
        text = f"{len(ranks):,} ranks, {ranks[0].rank} to {ranks[-1].rank}"
        axes.text(left + width / 2, top - 0.2, text, ha="center", va="center", fontsize=10)
        return
    leaders = {group.leader for group in run.groups}
    lost = {rank for event in run.events if event.kind == "loss" for rank in event.ranks}
    for place, rank in enumerate(ranks):
        row, column = divmod(place, per_row)
        of_row = min(per_row, len(ranks) - row * per_row)
        start = left + (width - of_row * (_SQUARE + _GAP) + _GAP) / 2
        x, y = start + column * (_SQUARE + _GAP), top - _SQUARE - row * (_SQUARE + _GAP)
        is_lost = rank.rank in lost
        border = palette.VERMILLION if is_lost else palette.TEXT
        thick = 2.6 if rank.rank in leaders else 0.9
        patch = _box(axes, x, y, _SQUARE, _SQUARE, "white", border, thick)
        patch.set_linestyle("--" if is_lost else "-")
        axes.text(
            x + _SQUARE / 2, y + _SQUARE / 2, str(rank.rank), ha="center", va="center",
            fontsize=10, fontweight="bold" if rank.rank in leaders else "normal",
        )  # fmt: skip
        if is_lost:
            for ends in ([y, y + _SQUARE], [y + _SQUARE, y]):
                axes.plot([x, x + _SQUARE], ends, color=palette.VERMILLION, linewidth=1.4)


def _draw_links(
    axes: Axes,
    run: Run,
    kinds: Sequence[str],
    tops: Sequence[float],
    heights: Sequence[float],
    count: int,
    width: float,
) -> None:
    """Draw a line through each kind's ranks, and one that joins the kinds."""
    right = _LEFT + count * (width + 0.15) - 0.15
    spine = right + 0.22
    middles = [top - height / 2 for top, height in zip(tops, heights, strict=True)]
    for kind, y in zip(kinds, middles, strict=True):
        label = f"{_short(kind or 'unknown', 14)}\n{_within(run, kind)}"
        axes.text(0.08, y, label, ha="left", va="center", fontsize=10)
        end = spine if len(kinds) > 1 else right
        axes.plot([_LEFT - 0.15, end], [y, y], color=palette.BLUE, linewidth=1.6, zorder=0)
    if len(kinds) > 1:
        axes.plot(
            [spine, spine], [middles[-1], middles[0]], color=palette.VERMILLION, linewidth=2.6
        )
        used = f"\n{run.algorithm}" if run.algorithm else ""
        seconds = run.allreduce_sec.get(run.algorithm)
        took = f", {1e3 * seconds:.3g} ms" if seconds else ""
        y = (middles[0] + middles[-1]) / 2
        text = f"between kinds:\nMPI allreduce{used}{took}"
        axes.text(spine + 0.1, y, text, ha="left", va="center", fontsize=10)


def _within(run: Run, kind: str) -> str:
    """Return how many ranks a kind has, and the library by which they reach each other."""
    libraries = {rank.library for rank in run.ranks.values() if rank.kind == kind}
    grouped = sum(len(group.ranks) for group in run.groups if group.kind == kind)
    count = grouped or sum(r.kind == kind for r in run.ranks.values())
    by = ", ".join(sorted(name.upper() for name in libraries if name)) or "MPI"
    return f"{count:,} rank{'s' * (count != 1)}, {_short(by, 10)}"


def _draw_key(axes: Axes, run: Run, hidden: int) -> None:
    parts = ["square: rank", "thick border: leader of its group"]
    if any(event.kind == "loss" for event in run.events):
        parts.append("crossed out: lost during the run")
    if len({rank.host for rank in run.ranks.values()}) > 1:
        parts.append("blue between boxes: network")
    if hidden > 0:
        parts.append(f"{hidden} more combinations of hosts are not drawn")
    axes.text(0.08, 0.18, "; ".join(parts), fontsize=SMALL, va="center")
    slowed = [f"rank {r.rank} slowed {r.slowdown}" for r in run.ranks.values() if r.slowdown]
    if slowed:
        text = "emulated: " + ", ".join(slowed[:4]) + (" and more" if len(slowed) > 4 else "")
        axes.text(0.08, 0.43, text, fontsize=SMALL, va="center")


def _box(
    axes: Axes,
    left: float,
    bottom: float,
    width: float,
    height: float,
    color: str,
    border: str,
    line: float = 0.9,
) -> FancyBboxPatch:
    from matplotlib.patches import FancyBboxPatch

    patch = FancyBboxPatch(
        (left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.06",
        facecolor=color, edgecolor=border, linewidth=line,
    )  # fmt: skip
    axes.add_patch(patch)
    return patch


def describe_topology(run: Run) -> str:
    """Describe that figure in words."""
    if not run.ranks:
        return "The ranks are not known."
    hosts = len({rank.host for rank in run.ranks.values()})
    groups = [
        f"{group.kind or 'unknown kind'}: {len(group.ranks)} rank{'s' * (len(group.ranks) != 1)}"
        + ("" if group.leader is None else f", led by rank {group.leader}")
        for group in run.groups[:12]
    ]
    text = f"{len(run.ranks)} ranks on {hosts} host{'s' * (hosts != 1)}. " + "; ".join(groups) + "."
    if len(run.groups) > 1 and run.algorithm:
        text += f" Gradients are summed between kinds over MPI by {run.algorithm}."
    return text


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(1, most - 1)] + "…"
