"""Which ranks and steps `--profile` names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kaitian_mpi.config.values import out_of_range
from kaitian_mpi.errors import UserError

MAX_STEPS = 1000
"""The most steps: torch's profiler keeps all of them in memory, some MB each."""
_SPAN = r"\d{1,6}(?:-\d{1,6})?"
_WINDOW = re.compile(rf"(all|{_SPAN}(?:,\s*{_SPAN})*)\s*@\s*(\d{{1,9}})(?:-(\d{{1,9}}))?")


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
    if not (found := _WINDOW.fullmatch(text.strip())):
        raise _wrong(text)
    first, last = int(found[2]), int(found[3] or found[2])
    chosen: set[int] = set()
    for span in [] if found[1] == "all" else found[1].split(","):
        low, _, high = span.partition("-")
        if not (ranks := range(int(low), int(high or low) + 1)):
            raise _wrong(text)
        chosen.update(ranks)
    if not 1 <= first <= last:
        raise _wrong(text)
    if last - first >= MAX_STEPS:
        raise out_of_range("profile", text, f"at most {MAX_STEPS} steps")
    return ProfileWindow(frozenset(chosen) or None, first, last)


def _wrong(text: str) -> UserError:
    return out_of_range("profile", text, "RANKS@STEPS, such as 0,3@50-60, 1-3@50 or all@50")
