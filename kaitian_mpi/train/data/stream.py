"""Reads a stream, a dataset that can only be iterated over, by the positions of its samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from kaitian_mpi.errors import UserError


class Stream:
    """The samples of a stream of known length, by position.

    Reading on is cheap; a position before the last one begins the stream again. Each rank reads all
    of it, and keeps its own samples.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self._left: Iterator[Any] | None = None
        self._position = 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        """Return the sample at a position, after reading those before it."""
        if self._left is None or index < self._position:
            self._left, self._position = iter(self.data), 0
        try:
            while self._position < index:
                next(self._left)
                self._position += 1
            sample = next(self._left)
        except StopIteration:
            raise UserError(
                f"Task: the data ended after {self._position} samples, and its length is "
                f"{len(self)}; let __len__ return what __iter__ yields"
            ) from None
        self._position += 1
        return sample

    def set_epoch(self, epoch: int) -> None:
        """Begin the stream of an epoch."""
        self._left = None
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to read it from its beginning."""
        return {**vars(self), "_left": None}


def is_stream(data: Any) -> bool:
    """Return whether a dataset can only be iterated over."""
    return isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")
