"""How large a batch fits a rank's memory, found out without running out of it."""

from __future__ import annotations

from kaitian_mpi.mpi.world import World

_SAFE_PART = 0.9  # of the limit: batches differ, and allocators waste some


class MemoryGauge:
    """Follows the memory that steps of growing batches take, and says how far they may grow.

    The peak grows by so much a sample, as measured between the last two sizes; a batch has room
    where the line through them stays below 90% of this rank's fair share.
    """

    def __init__(self, world: World) -> None:
        """Note this rank's share of what is free."""
        self._device, self._index = world.device_kind, world.device_index
        own = world.info
        sharers = sum((i.host, i.device) == (own.host, own.device) for i in world.infos)
        self._limit = _SAFE_PART * self._device.memory_limit_bytes(self._index, sharers)
        self._peaks: dict[int, int] = {}
        self._too_large: int | None = None

    def restart(self) -> None:
        """Begin a step."""
        self._device.restart_memory_peak(self._index)

    def note(self, batch: int) -> None:
        """Note the peak of a step with this batch."""
        self._peaks[batch] = self._device.memory_peak_bytes(self._index)

    def found_too_large(self, batch: int) -> None:
        """Note that the device ran out of memory, and let it go on without what it had cached."""
        self._too_large = batch
        self._device.release_cached_memory()

    def has_room_for(self, batch: int) -> bool:
        """Return whether a batch fits, as far as can be told."""
        if self._too_large is not None and batch >= self._too_large:
            return False
        if len(self._peaks) < 2:
            return True
        base, per_sample = self._line()
        return base + per_sample * batch <= self._limit

    def largest_batch(self, most: int) -> int | None:
        """Return the largest batch that fits, at least 1; None where `most` fits."""
        if self.has_room_for(most):
            return None
        tried = max(self._peaks, default=1)
        if self._too_large is not None and len(self._peaks) < 2:
            return tried
        base, per_sample = self._line()
        fits = int((self._limit - base) / per_sample) if per_sample else tried
        if self._too_large is not None:
            # Half of what was too much, or what was tried, whatever the line says.
            fits = min(fits, max(tried, self._too_large // 2))
        return max(1, min(fits, most))

    def _line(self) -> tuple[float, float]:
        """Return bytes without a sample, and bytes per sample."""
        smaller, larger = sorted(self._peaks)[-2:]
        per_sample = (self._peaks[larger] - self._peaks[smaller]) / (larger - smaller)
        return self._peaks[larger] - per_sample * larger, max(0.0, per_sample)
