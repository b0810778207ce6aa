"""The look of all figures: colors, titles, marks of events, and image files.

The colors, by Okabe and Ito (2008), differ for color-blind readers too; each comes with a second
sign: a line, marker or hatch.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.report.run import PlanChange, RecordedEvent, RecordedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK = "#000000"
ORANGE = "#E69F00"
SKY_BLUE = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
TEXT = "#1A1A1A"
MUTED = "#555555"
GRID = "#D9D9D9"

Drawn: TypeAlias = "tuple[Figure | None, str]"
"""A figure, or None if there is nothing to show, and its content in words."""

FILLS = {
    "data": ("#F0E442", "---"),
    "forward": (SKY_BLUE, ""),
    "backward": ("#4A9BCB", "///"),
    "compute": (SKY_BLUE, "///"),
    "optimizer": (GREEN, "\\\\\\"),
    "wait": ("#E6E6E6", "xx"),
    "other": ("#FFFFFF", ""),
}
"""The color and the hatch of each phase of a step."""

WIDTH = 9.0
"""The width of all figures of a report, in inches."""
SMALL = 9
"""The size of the smallest text, in points."""
TIME = "time since the start (s)"
EMULATED = "EMULATED devices or speeds"
DPI = 110
_COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, BLACK, SKY_BLUE)
_LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def line_style(number: int) -> dict[str, Any]:
    """Return the look of a rank's or kind's line, the same in all figures."""
    return {
        "color": _COLORS[number % len(_COLORS)],
        "linestyle": _LINES[number % len(_LINES)],
        "marker": _MARKERS[number % len(_MARKERS)],
    }


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Draw with matplotlib's own defaults, whatever the user has configured.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UserError(
            'the figures need matplotlib, which is not installed; pip install "kaitian-mpi[report]"'
        ) from error
    defaults = mpl.rcParamsDefault
    settings = {
        **{name: defaults[name] for name in defaults if "backend" not in name},
        "text.parse_math": False,  # a host name may have dollar signs
        "svg.fonttype": "none",
        "font.size": 10,
        "axes.titlesize": 10,
        "figure.titlesize": 12,
        **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), SMALL),
        **dict.fromkeys(("text.color", "axes.labelcolor"), TEXT),
        "axes.edgecolor": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
        "hatch.linewidth": 0.6,
        "hatch.color": MUTED,
    }
    with warnings.catch_warnings(), mpl.rc_context(settings):
        # A host name may have characters that the font lacks; they are shown as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        yield


def new_figure(run: RecordedRun, title: str, height: float) -> Figure:
    """Return an empty figure, whose title says whether the run is emulated."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
    suffix = f" · {EMULATED}" if run.emulated else ""
    figure.suptitle(title + suffix, x=0.01, ha="left", fontweight="bold")
    return figure


def finish_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """Label an axes' sides, and explain its lines on the right."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    if axes.get_legend_handles_labels()[0]:
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
        axes.legend(**place, frameon=False, handlelength=3.5, borderaxespad=0)


def mark_changes(
    panels: Sequence[Axes], run: RecordedRun, at: Callable[[PlanChange | RecordedEvent], float]
) -> None:
    """Draw a vertical line at each new plan and each loss, named above the first panel.

    The limits of the x axes are final.
    """
    marks = [(at(plan), str(number), MUTED, 4) for number, plan in enumerate(run.plans[1:], 1)]
    losses = [event for event in run.events if event.kind == "loss"]
    marks += [(at(loss), _lost(loss.ranks), VERMILLION, 20) for loss in losses]
    low, high = panels[0].get_xlim()
    last = {4: low - high, 20: low - high}  # the last text of each row
    for x, text, color, offset in sorted(marks)[:200]:
        for axes in panels:
            axes.axvline(x, color=color, linestyle=":" if color == MUTED else "-", linewidth=1.1)
        if x - last[offset] < (len(text) + 2) * 0.009 * (high - low):
            continue
        last[offset] = x
        panels[0].annotate(
            text,
            (x, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, offset),
            textcoords="offset points",
            ha="center",
            fontsize=SMALL,
            fontweight="normal" if color == MUTED else "bold",
        )


def _lost(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} lost"
    return f"{len(ranks) or 'some'} ranks lost"


def to_image(figure: Figure, kind: str) -> bytes:
    """Return a figure as the content of a `png` or `svg` file."""
    target = io.BytesIO()
    with drawing():
        metadata = {"Date": None} if kind == "svg" else {}
        figure.savefig(target, format=kind, dpi=DPI, metadata=metadata)
    return target.getvalue()
