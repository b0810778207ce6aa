"""Batches of any dataset, by the indices of their samples, and the batches of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset, default_collate

from kaitian_mpi.balance.shares import split_micro_batches
from kaitian_mpi.errors import UserError


class Batches(Dataset[Any]):
    """Wraps a map-style dataset; indexed by a list of sample indices, it returns a batch.

    Args:
        data: a dataset of one sample or more; one that has `__getitems__` is asked for a batch's
            samples at once.
        collate: makes a batch of a list of samples; None: torch's `default_collate`.
    """

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self.data = data
        self.collate = collate or default_collate

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.data)

    def __getitem__(self, indices: list[int]) -> Any:
        """Return the batch of these samples, at least one."""
        return self.collate(self.samples(indices))

    def samples(self, indices: list[int]) -> list[Any]:
        """Return these samples.

        Raises:
            UserError: the dataset's `__getitems__` returns more or fewer.
        """
        if not hasattr(self.data, "__getitems__"):
            return [self.data[index] for index in indices]
        samples = list(self.data.__getitems__(indices))
        if len(samples) != len(indices):
            raise UserError(
                f"__getitems__ of {type(self.data).__name__} returned {len(samples)} samples for "
                f"{len(indices)} indices; return one for each"
            )
        return samples

    def one(self, index: int) -> Any:
        """Return a batch of one sample, fetched without `__getitems__`."""
        return self.collate([self.data[index]])


def as_batches(data: Any, collate: Callable[[list[Any]], Any] | None = None) -> Any:
    """Return a dataset that returns a batch when indexed by a list of sample indices.

    Args:
        data: a dataset. One whose attribute `gives_batches` is true is that already.
        collate: as for `Batches`.
    """
    is_one = isinstance(data, Batches) or getattr(data, "gives_batches", False)
    return data if is_one else Batches(data, collate)


class MicroBatch(NamedTuple):
    """Samples that a rank computes at once."""

    samples: int
    """0 for a batch that stands in where a rank has no sample in a step."""
    batch: Any


class StepBatches(Dataset[list[MicroBatch]]):
    """Returns a rank's share of a step as micro-batches, none of them without a sample.

    Args:
        batches: returns a batch when indexed by a list of sample indices.
        micro_batch_size: the most samples of a micro-batch; None: no limit.
        min_batch: the fewest.
    """

    def __init__(self, batches: Any, micro_batch_size: int | None, min_batch: int) -> None:
        self._batches = batches
        self._micro_batch_size, self._min_batch = micro_batch_size, min_batch

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._batches)

    def __getitem__(self, indices: Sequence[int]) -> list[MicroBatch]:
        """Return the micro-batches of these samples; of none, one with 0 samples to stand in."""
        try:
            return self._parts(indices)
        except StopIteration as error:  # torch's loader would take it for the end of the epoch
            raise RuntimeError("the dataset, or collate, raised StopIteration") from error

    def _parts(self, indices: Sequence[int]) -> list[MicroBatch]:
        if not indices:
            return [MicroBatch(0, self._batches[list(range(self._min_batch))])]
        parts, first = [], 0
        for size in split_micro_batches(len(indices), self._micro_batch_size, self._min_batch):
            chosen = list(indices[first : first + size])
            parts.append(MicroBatch(size, self._batches[chosen]))
            first += size
        return parts
