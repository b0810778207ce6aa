"""Which ranks and steps `--profile` names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kaitian_mpi.config.values import out_of_range
from kaitian_mpi.errors import UserError

MAX_STEPS = 1000
"""The most steps: torch's profiler keeps all of them in memory, some MB each."""
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


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
        """Check that a job of `size` ranks has these ranks.

        Raises:
            UserError: it has not.
        """
        if missing := sorted(rank for rank in self.ranks or () if rank >= size):
            raise UserError(
                f"--profile names rank {missing[0]}, but the job has only "
                + (f"ranks 0 to {size - 1}" if size > 1 else "rank 0")
            )


def parse_profile(text: str) -> ProfileWindow:
    """Return what a text such as `0,3@50-60`, `0-3@50` or `all@50-60` names.

    Raises:
        UserError: it is not of this form.
    """
    ranks, _, steps = text.partition("@")
    window = _parse_range(steps)
    if window is None or window[0] < 1 or not _has_ranks(ranks):
        raise out_of_range("profile", text, "RANKS@STEPS, such as 0,3@50-60, 1-3@50 or all@50")
    first, last = window
    if last - first >= MAX_STEPS:
        raise out_of_range("profile", text, f"at most {MAX_STEPS} steps")
    if ranks == "all":
        return ProfileWindow(None, first, last)
    spans = [_parse_range(each) for each in ranks.split(",")]
    chosen = frozenset(rank for span in spans if span for rank in range(span[0], span[1] + 1))
    return ProfileWindow(chosen, first, last)


def _has_ranks(text: str) -> bool:
    spans = [_parse_range(each) for each in text.split(",")]
    return text == "all" or all(span and span[1] - span[0] < 1 << 20 for span in spans)


def _parse_range(text: str) -> tuple[int, int] | None:
    """Return the first and the last number of `7` or `7-9`; None if it is neither."""
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        return None
    first = int(found[1])
    last = first if found[2] is None else int(found[2])
    return (first, last) if first <= last else None
