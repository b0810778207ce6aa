"""Turns figures into SVG for an HTML page, and into image files."""

from __future__ import annotations

import html
import io
import re
from typing import TYPE_CHECKING

from kaitian_mpi.observe.report.canvas import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PNG_DPI = 110
_ID = re.compile(r' id="([^"]*)"')
_USED_ID = re.compile(r'(?:url\(#|href="#)([^")]+)')
_OPENING = re.compile(r"<svg\b[^>]*>")
_SIZE = re.compile(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"')
_METADATA = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL)


def to_svg(figure: Figure, alt: str, name: str = "figure") -> str:
    """Return a figure as an `<svg>` element to be put into an HTML page.

    Args:
        figure: what to draw.
        alt: what the figure shows, for those who do not see it.
        name: different for each figure of a page; makes the element's ids unique.
    """
    drawn = to_image(figure, "svg").decode()
    drawn = _METADATA.sub("", drawn[drawn.index("<svg") :])
    used = set(_USED_ID.findall(drawn))
    prefix = re.sub(r"[^a-z0-9]+", "-", name.lower()) + "-"
    drawn = _ID.sub(lambda m: f' id="{prefix}{m[1]}"' if m[1] in used else "", drawn)
    drawn = re.sub(r'(url\(#|href="#)([^")]+)', rf"\g<1>{prefix}\g<2>", drawn)
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
