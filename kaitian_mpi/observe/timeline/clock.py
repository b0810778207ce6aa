"""Relates the ranks' clocks by the round trips of a few messages (Cristian's algorithm)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

_MAX_ALIGNMENTS = 1000


class RoundTrip(NamedTuple):
    """A message to another rank and its answer, in seconds."""

    sent: float
    """When the message was sent, by this rank's clock."""
    answered: float
    """When it was answered, by the other rank's clock."""
    received: float
    """When the answer arrived, by this rank's clock."""


class Offset(NamedTuple):
    """The difference of two clocks: seconds to add to this rank's clock."""

    seconds: float
    error: float
    """The largest possible error: half the round trip, as if one direction had taken all of it."""


def estimate_offset(trips: Sequence[RoundTrip]) -> Offset:
    """Return the offset to the other rank's clock, by the shortest round trip."""
    best = min(trips, key=lambda trip: trip.received - trip.sent)
    middle = (best.sent + best.received) / 2
    return Offset(best.answered - middle, (best.received - best.sent) / 2)


class AlignedClock:
    """Translates times of this rank's clock into the run's time, in seconds since its start.

    Between two alignments the offset is interpolated, as clocks drift apart by some microseconds a
    second. Earlier times use the first alignment's offset, later ones the last's.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._offsets: list[float] = []
        self.error = 0.0
        """The largest possible error of the last offset, in seconds."""

    @property
    def is_aligned(self) -> bool:
        """Whether there is an offset."""
        return bool(self._times)

    def align(self, time: float, offset: Offset) -> None:
        """Add the offset that holds at a time of this rank's clock, later than those before."""
        # Long events, such as an evaluation, began several alignments before they are written.
        del self._times[:-_MAX_ALIGNMENTS], self._offsets[:-_MAX_ALIGNMENTS]
        self._times.append(time)
        self._offsets.append(offset.seconds)
        self.error = offset.error

    def run_time(self, time: float) -> float:
        """Return the run's time, in seconds, that corresponds to a time of this rank's clock."""
        assert self._times, "not aligned yet"
        after = bisect_right(self._times, time)
        if after in (0, len(self._times)):
            return time + self._offsets[max(0, after - 1)]
        since, until = self._times[after - 1 : after + 1]
        first, second = self._offsets[after - 1 : after + 1]
        return time + first + (second - first) * (time - since) / (until - since)
