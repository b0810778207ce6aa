"""Which ranks and steps `--profile` names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kaitian_mpi.config.values import out_of_range
from kaitian_mpi.errors import UserError

MAX_STEPS = 1000
"""The most steps: torch's profiler keeps all of them in memory, some MB each."""
_MAX_RANK = 1 << 20
_SPAN = r"\d{1,9}(?:-\d{1,9})?"
_WINDOW = re.compile(rf"(all|{_SPAN}(?:,\s*{_SPAN})*)\s*@\s*({_SPAN})")


@dataclass(frozen=True)
class ProfileWindow:
    """What is profiled."""

    ranks: frozenset[int] | None
    """World ranks; None for all."""
    first_step: int
    """From 1."""
    last_step: int

    def includes_rank(self, rank: int) -> bool:
        """Return whether a world rank is profiled."""
        return self.ranks is None or rank in self.ranks

    def includes_step(self, step: int) -> bool:
        """Return whether a step is."""
        return self.first_step <= step <= self.last_step

    def check_ranks(self, size: int) -> None:
        """Check that a job of `size` ranks has these ranks."""
        if missing := sorted(rank for rank in self.ranks or () if rank >= size):
            raise UserError(f"--profile names rank {missing[0]}; the highest is rank {size - 1}")


def parse_profile(text: str) -> ProfileWindow:
    """Return what a text such as `0,3@50-60`, `0-3@50` or `all@50-60` names."""
    found = _WINDOW.fullmatch(text.strip())
    ranks, steps = found.groups() if found else ("", "0")
    first, last = _span(steps)
    spans = [] if ranks in ("", "all") else [_span(each) for each in ranks.split(",")]
    is_wrong = any(low > high or high > _MAX_RANK for low, high in spans) or first > last
    if not ranks or is_wrong or first < 1:
        raise out_of_range("profile", text, "RANKS@STEPS, such as 0,3@50-60, 1-3@50 or all@50")
    if last - first >= MAX_STEPS:
        raise out_of_range("profile", text, f"at most {MAX_STEPS} steps")
    chosen = frozenset(rank for low, high in spans for rank in range(low, high + 1))
    return ProfileWindow(None if ranks == "all" else chosen, first, last)


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)
