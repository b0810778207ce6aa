"""How long a host that was lost is held back. Pure."""

from __future__ import annotations

_MAX_SEC = 3600.0


class Backoff:
    """Holds a host back after each loss, twice as long as after the one before, at most an hour.

    A host that was not lost for an hour counts as new.
    """

    def __init__(self, first_sec: float) -> None:
        """Start with no host held back.

        Args:
            first_sec: how long a host is held back after its first loss.
        """
        self._first_sec = first_sec
        self._max_sec = max(_MAX_SEC, first_sec)
        self._losses: dict[str, int] = {}
        self._free_since: dict[str, float] = {}
        self._held: set[str] = set()

    def lose(self, name: str, now: float) -> float:
        """Record a loss; return for how many seconds the host is held back."""
        if now - self._free_since.get(name, now) > self._max_sec:
            self._losses[name] = 0
        losses = self._losses[name] = self._losses.get(name, 0) + 1
        seconds = min(self._first_sec * 2.0 ** min(losses - 1, 64), self._max_sec)
        self._free_since[name] = now + seconds
        self._held.add(name)
        return seconds

    def is_held(self, name: str, now: float) -> bool:
        """Return whether a host is held back."""
        return name in self._held and now < self._free_since[name]

    def release_all(self) -> None:
        """Hold no host back until its next loss."""
        self._held.clear()
