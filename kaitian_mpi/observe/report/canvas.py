"""Blank figures that all look alike, what is drawn in several of them, and their files."""

from __future__ import annotations

import contextlib
import html
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.report import palette
from kaitian_mpi.observe.report.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.0
"""Of all figures of a report, in inches."""
SMALL = 9
"""The size of the smallest text, in points."""
TIME = "time since the start (s)"
EMULATED = "EMULATED devices or speeds"
MAX_LINES = 8
"""Ranks that get a line each; more are shown as a heat map."""
_MAX_MARKS = 200
PNG_DPI = 110
_ID = re.compile(r'( id="|url\(#|href="#)')
_OPENING = re.compile(r"<svg\b[^>]*>")
_SIZE = re.compile(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"')
_METADATA = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL)
_LINE_HEIGHT = 0.19  # inches
_EDGES = 1.6  # inches of a figure's height that are outside its axes


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
    settings = {
        **{
            name: mpl.rcParamsDefault[name] for name in mpl.rcParamsDefault if "backend" not in name
        },
        "text.parse_math": False,  # a host name may have dollar signs
        "svg.fonttype": "none",  # text that can be read aloud, searched and copied
        "svg.hashsalt": "kaitian-report",  # the same ids each time
        "font.size": 10,
        "axes.titlesize": 10,
        "figure.titlesize": 12,
        "legend.fontsize": SMALL,
        "xtick.labelsize": SMALL,
        "ytick.labelsize": SMALL,
        "text.color": palette.TEXT,
        "axes.labelcolor": palette.TEXT,
        "axes.edgecolor": palette.MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.constrained_layout.w_pad": 0.08,
        "figure.constrained_layout.h_pad": 0.06,
        "hatch.linewidth": 0.6,
        "hatch.color": palette.MUTED,
    }
    with warnings.catch_warnings(), mpl.rc_context(settings):
        # A host name may have characters that the font lacks; they are shown as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        yield


def new_figure(title: str, run: Run, height: float) -> Figure:
    """Return an empty figure with a title that says whether the run is emulated."""
    return titled_figure(title, is_emulated=run.emulated, height=height)


def titled_figure(title: str, *, is_emulated: bool, height: float) -> Figure:
    """Return an empty figure; its title says whether what it shows is emulated."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
    suffix = f" · {EMULATED}" if is_emulated else ""
    figure.suptitle(title + suffix, x=0.01, ha="left", fontweight="bold")
    return figure


def finish_axes(axes: Axes, x_label: str, y_label: str, *, from_zero: bool = True) -> None:
    """Label an axes' sides, and give it a grid behind the data."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", color=palette.GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.margins(x=0.01)


@dataclass(frozen=True)
class End:
    """The label beside the right end of a line."""

    y: float
    text: str
    color: str
    line: palette.LineStyle
    marker: str = ""


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Write labels with samples of their lines right of the axes, apart from one another.

    Args:
        axes: their limits are final.
        ends: of all lines.
    """
    from matplotlib.lines import Line2D

    figure = axes.get_figure(root=True)
    assert figure is not None
    low, high = axes.get_ylim()
    inches = (figure.get_size_inches()[1] - _EDGES) / max(1, len(figure.axes))
    gap = (high - low) * _LINE_HEIGHT / max(1.0, inches)
    places = spread([end.y for end in ends], gap, low, high)
    for end, place in zip(ends, places, strict=True):
        sample = Line2D(
            (1.008, 1.045),
            (place, place),
            transform=axes.get_yaxis_transform(),
            color=end.color,
            linestyle=end.line,
            marker=end.marker,
            markersize=5,
            markevery=[1],
            linewidth=1.8,
            clip_on=False,
        )
        axes.add_line(sample)
        axes.annotate(
            end.text,
            (1.06, place),
            xycoords=axes.get_yaxis_transform(),
            fontsize=SMALL,
            va="center",
            ha="left",
            annotation_clip=False,
        )
    axes.set_ylim(low, high)


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places for labels near `values`, in their order, at least `gap` apart if possible."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    gap = min(gap, (high - low) / max(1, len(values) - 1)) if len(values) > 1 else gap
    places = [0.0] * len(values)
    below = low - gap
    for i in order:
        below = places[i] = max(values[i], below + gap)
    above = high + gap
    for i in reversed(order):
        above = places[i] = min(places[i], above - gap)
    return places


def mark_changes(panels: Sequence[Axes], run: Run, at: Callable[[Any], float]) -> None:
    """Draw a vertical line at each new plan and each loss, numbered above the first panel.

    Args:
        panels: one above the other; their x limits are final.
        run: whose plans and losses.
        at: returns the place of a plan or event on the x axis.
    """
    marks = [(at(event), _lost(event.ranks), True) for event in run.events if event.kind == "loss"]
    marks += [(at(plan), str(number), False) for number, plan in enumerate(run.plans[1:], 1)]
    low, high = panels[0].get_xlim()
    for axes in panels:
        for x, _, is_loss in marks[:_MAX_MARKS]:
            color, line = (palette.VERMILLION, "-") if is_loss else (palette.MUTED, ":")
            axes.axvline(x, color=color, linestyle=line, linewidth=1.1, zorder=1.5)
    free: list[list[tuple[float, float]]] = [[], []]
    for x, text, is_loss in sorted(marks, key=lambda mark: (not mark[2], mark[0])):
        width = (len(text) + 2) * 0.0085 * (high - low)
        for row, taken in enumerate(free):
            if all(abs(x - other) > (width + reach) / 2 for other, reach in taken):
                taken.append((x, width))
                panels[0].annotate(
                    text,
                    (x, 1),
                    xycoords=("data", "axes fraction"),
                    xytext=(0, 4 + 15 * row),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=SMALL,
                    color="white" if is_loss else palette.TEXT,
                    bbox={
                        "boxstyle": "round,pad=0.2",
                        "facecolor": "#B34700" if is_loss else "white",
                        "edgecolor": "#B34700" if is_loss else palette.MUTED,
                    },
                )
                break


def _lost(ranks: Sequence[int]) -> str:
    if not ranks:
        return "a rank lost"
    if len(ranks) > 3:
        return f"{len(ranks)} ranks lost"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} lost"


def to_svg(figure: Figure, alt: str, name: str = "figure") -> str:
    """Return a figure as an `<svg>` element to be put into an HTML page.

    Args:
        figure: what to draw.
        alt: what the figure shows, for those who do not see it.
        name: different for each figure of a page; makes the element's ids unique.
    """
    drawn = to_image(figure, "svg").decode()
    drawn = _METADATA.sub("", drawn[drawn.index("<svg") :])
    prefix = re.sub(r"[^a-z0-9]+", "-", name.lower()) + "-"
    drawn = _ID.sub(rf"\g<1>{prefix}", drawn)
    size = _SIZE.search(drawn)
    assert size is not None
    label = html.escape(alt, quote=True)
    opening = (
        f'<svg role="img" aria-label="{label}" viewBox="{size[0][9:-1]}" '
        f'width="{float(size[1]) * 4 / 3:.0f}" height="{float(size[2]) * 4 / 3:.0f}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f"<title>{html.escape(alt, quote=False)}</title>"
    )
    return _OPENING.sub(lambda _: opening, drawn, count=1).strip()


def to_image(figure: Figure, kind: str) -> bytes:
    """Return a figure as the content of a `png` or `svg` file."""
    target = io.BytesIO()
    with drawing():
        metadata = {"Date": None} if kind == "svg" else {}
        figure.savefig(target, format=kind, dpi=PNG_DPI, metadata=metadata)
    return target.getvalue()
