"""Shows in the timeline when chunks arrive, beside what is computed meanwhile."""

from __future__ import annotations

from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.train.layouts.peers import HostMessage

COMPUTING = "experts"
"""The lane of what is computed of each chunk."""


class Arrivals:
    """The chunks that a rank sends to this one in one direction of a call.

    One is under way from the arrival of that before it, or from when it was expected.
    """

    def __init__(self, lane: str) -> None:
        """Show them in a lane, if this step is recorded."""
        current = recorder.current
        self._recorder = current if current is not None and current.is_recording else None
        self._lane = lane
        self._since = 0.0 if current is None else current.now()

    def follow(self, message: HostMessage, chunk: int, size: int) -> None:
        """Record when a message of so many bytes arrives, by the thread that receives it."""
        if self._recorder is not None:
            message.when_completed(lambda: self._record(chunk, size))

    def _record(self, chunk: int, size: int) -> None:
        if self._recorder is not None:
            now = self._recorder.now()
            self._recorder.add(self._lane, f"chunk {chunk}", self._since, now, {"bytes": size})
            self._since = now
