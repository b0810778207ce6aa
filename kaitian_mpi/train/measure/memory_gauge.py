"""Predicts how large a batch fits in a rank's memory, usually without running out of it."""

from __future__ import annotations

from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World

_SAFE_FRACTION = 0.9  # of the limit, because batches differ and allocators waste some


class MemoryGauge:
    """Tracks the peak memory of steps with growing batches, and predicts which batches fit.

    The peak is assumed to be linear in the batch size, on the line through the last two
    measurements; a batch fits if the line is below 90% of this rank's fair share there.
    """

    def __init__(self, world: World) -> None:
        """Read this rank's fair share of the free memory."""
        self._device, self._index = world.device_kind, world.device_index
        sharers = sum(_memory_of(info) == _memory_of(world.info) for info in world.infos)
        self._limit = _SAFE_FRACTION * self._device.memory_limit_bytes(self._index, sharers)
        self._peaks: dict[int, int] = {}
        self._too_large: int | None = None

    def restart(self) -> None:
        """Reset the peak before a step."""
        self._device.restart_memory_peak(self._index)

    def record(self, batch: int) -> None:
        """Record the peak of a step with this batch."""
        self._peaks[batch] = self._device.memory_peak_bytes(self._index)

    def record_too_large(self, batch: int) -> None:
        """Record that this batch ran out of memory, and release the device's cached memory."""
        self._too_large = batch
        self._device.release_cached_memory()

    def has_room_for(self, batch: int) -> bool:
        """Return whether a batch is expected to fit; True with less than two measurements."""
        if self._too_large is not None and batch >= self._too_large:
            return False
        if len(self._peaks) < 2:
            return True
        base, per_sample = self._line()
        return base + per_sample * batch <= self._limit

    def largest_batch(self, wanted: int) -> int | None:
        """Return the largest batch that fits, at least 1; None if `wanted` fits."""
        if self.has_room_for(wanted):
            return None
        tried = max(self._peaks, default=1)
        if self._too_large is not None and len(self._peaks) < 2:
            return tried
        base, per_sample = self._line()
        fits = int((self._limit - base) / per_sample) if per_sample else tried
        if self._too_large is not None:
            # At most half of what was too large, or what has fit, whatever the line predicts.
            fits = min(fits, max(tried, self._too_large // 2))
        return max(1, min(fits, wanted))

    def _line(self) -> tuple[float, float]:
        """Return the bytes without samples, and the bytes per sample."""
        smaller, larger = sorted(self._peaks)[-2:]
        per_sample = (self._peaks[larger] - self._peaks[smaller]) / (larger - smaller)
        return self._peaks[larger] - per_sample * larger, max(0.0, per_sample)


def _memory_of(info: RankInfo) -> tuple[str, str]:
    """Identify the memory that a rank uses; two devices may both be the `cuda:0` of their rank."""
    return info.host, info.physical_device or info.device
