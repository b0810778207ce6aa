"""Data loaders for training and evaluation."""

from __future__ import annotations

import multiprocessing
import os
import select
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from kaitian_mpi.balance.shares import apportion
from kaitian_mpi.data.shared_tensors import SharedTensorDataset

_BATCHES_PER_WORKER = 2
_POLL_SEC = 0.5


def make_loader(
    dataset: Dataset,
    sampler: Sampler[list[int]],
    workers: int,
    pin_memory: bool,
    seed: int = 0,
) -> DataLoader[Any]:
    """Return a loader that fetches each list of indices from the sampler as one batch.

    Make a new loader each epoch: when iteration starts, each worker gets a copy of the dataset,
    including the epoch of its augmentation.

    Args:
        dataset: indexed by a list of sample indices.
        sampler: yields such lists.
        workers: data loading processes; 0 loads in this process.
        pin_memory: whether to copy batches into page-locked memory, for faster copies to a GPU.
        seed: seed of the workers' random numbers. The loader draws nothing from torch's global
            generator; otherwise dropout would depend on how often a run was interrupted.
    """
    return DataLoader(
        SharedTensorDataset(dataset) if workers else dataset,
        sampler=sampler,
        batch_size=None,
        num_workers=workers,
        pin_memory=pin_memory,
        generator=torch.Generator().manual_seed(seed),
        multiprocessing_context=_fork_server() if workers else None,
        prefetch_factor=_BATCHES_PER_WORKER if workers else None,
        worker_init_fn=_exit_with_rank,
    )


def _fork_server() -> BaseContext:
    # A process forked after MPI has started can crash: pytorch/pytorch#13787.
    context = multiprocessing.get_context("forkserver")
    # Otherwise each worker would import torch again, which takes seconds.
    context.set_forkserver_preload(["__main__", "kaitian_mpi.data.worker_process", "torch"])
    return context


def _exit_with_rank(_: int) -> None:
    """Make this worker exit when its rank is killed.

    torch watches the worker's parent, which is the fork server and not the rank; and the fork
    server lives as long as the worker does.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None
    assert rank.pid is not None
    watch = partial(_exit_after, rank.pid)
    threading.Thread(target=watch, name="exit-with-rank", daemon=True).start()


def _exit_after(rank: int) -> None:
    if hasattr(os, "pidfd_open"):
        with suppress(ProcessLookupError):
            select.select([os.pidfd_open(rank)], [], [])
    else:  # macOS
        while psutil.pid_exists(rank):
            time.sleep(_POLL_SEC)
    os._exit(1)


def steps_ahead(workers: int) -> int:
    """Return how many steps ahead of training a loader with these workers fetches batches.

    A plan that is set between two steps takes effect after the batches fetched ahead.
    """
    return workers * _BATCHES_PER_WORKER


def evaluation_indices(
    length: int, rank: int, shares: Sequence[float], batch: int
) -> list[list[int]]:
    """Return this rank's batches of an evaluation over `length` samples.

    Over all ranks each sample is used exactly once, in order; a rank may get none.

    Args:
        length: number of samples in the dataset.
        rank: this rank.
        shares: relative amounts of work, per rank.
        batch: maximum samples per batch.
    """
    counts = apportion(length, shares)
    start = sum(counts[:rank])
    stop = start + counts[rank]
    return [list(range(first, min(first + batch, stop))) for first in range(start, stop, batch)]
