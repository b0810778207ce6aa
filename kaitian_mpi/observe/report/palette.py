"""Colors that color-blind readers can tell apart, each with a second sign: a line, marker or hatch.

The colors are those of Okabe and Ito (2008), https://jfly.uni-koeln.de/color/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

LineStyle: TypeAlias = Any
"""Whatever matplotlib takes as `linestyle`."""

BLACK = "#000000"
ORANGE = "#E69F00"
SKY_BLUE = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
TEXT = "#1A1A1A"
MUTED = "#555555"
GRID = "#D9D9D9"
IDLE = "#E6E6E6"

_RANKS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, BLACK, SKY_BLUE)
_LINES: tuple[LineStyle, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class RankStyle:
    """How a rank's line looks."""

    color: str
    line: LineStyle
    marker: str


@dataclass(frozen=True)
class Fill:
    """How an area looks."""

    color: str
    hatch: str


PHASES = {
    "data": Fill(YELLOW, "---"),
    "forward": Fill(SKY_BLUE, ""),
    "backward": Fill("#4A9BCB", "///"),
    "optimizer": Fill(GREEN, "\\\\\\"),
    "compute": Fill(SKY_BLUE, "///"),
    "wait": Fill(IDLE, "xx"),
    "other": Fill("#FFFFFF", ""),
}


def rank_style(rank: int) -> RankStyle:
    """Return a rank's style; the same in all figures, and different for the first 28 ranks."""
    return RankStyle(
        _RANKS[rank % len(_RANKS)], _LINES[rank % len(_LINES)], _MARKERS[rank % len(_MARKERS)]
    )
