"""Loads a rank's batches, in processes of its own if wanted."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from kaitian_mpi.errors import UserError
from kaitian_mpi.train.data.batches import MicroBatch, Share, StepBatches, Stream, as_collated

_BATCHES_PER_WORKER = 2


class ShareLoader:
    """Loads a rank's shares of steps, in processes that stay until it is closed.

    The first share starts them. Each gets a copy of the dataset as it is then, and imports the
    script again, which takes seconds; later changes of the dataset do not reach it, except by
    `set_epoch`.
    """

    def __init__(self, batches: Any, workers: int, pin_memory: bool) -> None:
        self.batches = batches
        self.data = StepBatches(batches)
        # Of a stream, each process would read all.
        is_stream = isinstance(getattr(batches, "data", None), Stream)
        self.workers = min(workers, 1) if is_stream else workers
        self._pin_memory = pin_memory
        self._shares = _Shares()
        self._loader: DataLoader[list[MicroBatch]] | None = None

    def load(self, shares: Iterator[Share]) -> Iterator[list[MicroBatch]]:
        """Return an iterator over the loaded shares; it replaces the earlier one."""
        self._shares.restart(shares)
        if self._loader is None:
            self._loader = self._make_loader()
        try:
            return map(_raise_error, self._loader) if self.workers else iter(self._loader)
        except Exception as error:
            if not self.workers or not re.search("pickle|local object", str(error)):
                raise
            raise UserError(
                f"the dataset and collate cannot be sent to the {self.workers} workers, which a "
                f"fork server starts: {error}; use functions and classes of a module in place of "
                "lambdas and local ones, or workers=0"
            ) from error

    def close(self) -> None:
        """End the processes."""
        if self._loader is not None and (loading := self._loader._iterator) is not None:
            loading._shutdown_workers()  # type: ignore[attr-defined]
        self._loader = None

    def _make_loader(self) -> DataLoader[list[MicroBatch]]:
        workers = self.workers
        data = cast("Dataset[list[MicroBatch]]", self.data)
        if workers:
            from kaitian_mpi.train.data.shared_tensors import SharedTensorDataset

            data = SharedTensorDataset(data)
        return DataLoader(
            data,
            sampler=self._shares,
            batch_size=None,
            collate_fn=as_collated,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self._pin_memory,
            # Its own: drawing from torch's would change the dropout of a run that is resumed.
            generator=torch.Generator(),
            multiprocessing_context=_fork_server() if workers else None,
            prefetch_factor=_BATCHES_PER_WORKER if workers else None,
            worker_init_fn=_exit_with_rank,
        )


def _raise_error(share: list[MicroBatch] | UserError) -> list[MicroBatch]:
    """Return a share, unless a worker has sent the error that it met."""
    if isinstance(share, UserError):
        raise share
    return share


class _Shares(Sampler[Share]):
    """Yields the shares to load next; a `DataLoader` keeps its sampler."""

    def __init__(self) -> None:
        self._next: Iterator[Share] = iter(())

    def restart(self, shares: Iterator[Share]) -> None:
        """Yield these from now on."""
        self._next = shares

    def __iter__(self) -> Iterator[Share]:
        return self._next


def _fork_server() -> BaseContext:
    # A process forked after MPI has started can crash: pytorch/pytorch#13787.
    context = multiprocessing.get_context("forkserver")
    # Otherwise each worker would import torch again, which takes seconds.
    context.set_forkserver_preload(["__main__", "kaitian_mpi.train.data.worker_process", "torch"])
    return context


def _exit_with_rank(_: int) -> None:
    """Make this worker exit when its rank is killed.

    torch watches the worker's parent, which is the fork server and not the rank; and the fork
    server lives as long as the worker does.
    """
    threading.Thread(target=_exit_after_rank, name="exit-with-rank", daemon=True).start()


def _exit_after_rank() -> None:
    rank = multiprocessing.parent_process()
    assert rank is not None
    rank.join()
    os._exit(1)


def steps_ahead(workers: int) -> int:
    """Return the number of steps by which a loader with these workers is ahead of the training.

    A plan that is set between two steps takes effect after the batches fetched ahead.
    """
    return workers * _BATCHES_PER_WORKER
