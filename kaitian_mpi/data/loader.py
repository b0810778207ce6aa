"""From sample indices to batches."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from kaitian_mpi.balance.shares import apportion


def make_loader(
    dataset: Dataset, sampler: Sampler[list[int]], workers: int, pin_memory: bool
) -> DataLoader[Any]:
    """Return a loader that fetches each of the sampler's lists as one batch.

    Make a new one each epoch: workers get a copy of the data set, and with it the epoch of its
    augmentation, when iteration starts.

    Args:
        dataset: indexed by a list of sample indices.
        sampler: yields such lists.
        workers: data loading processes; 0 loads in this one.
        pin_memory: whether to copy batches into page-locked memory, for faster copies to a GPU.
    """
    return DataLoader(
        dataset,
        sampler=sampler,
        batch_size=None,
        num_workers=workers,
        pin_memory=pin_memory,
        # A process forked after MPI has started can crash: pytorch/pytorch#13787.
        multiprocessing_context="forkserver" if workers else None,
    )


def evaluation_indices(length: int, rank: int, size: int, batch: int) -> list[list[int]]:
    """Return this rank's batches of an evaluation over `length` samples.

    Over all `size` ranks each sample comes exactly once, in order; a rank may have none.

    Args:
        length: samples of the data set.
        rank: this rank.
        size: how many ranks.
        batch: samples per batch, at most.
    """
    shares = apportion(length, [1] * size)
    start = sum(shares[:rank])
    stop = start + shares[rank]
    return [list(range(first, min(first + batch, stop))) for first in range(start, stop, batch)]
