"""Loads a rank's batches, in processes of its own if wanted."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from kaitian_mpi.errors import UserError
from kaitian_mpi.train.data.batches import (
    MicroBatch,
    Share,
    StepBatches,
    Stream,
    as_collated,
    set_epoch_of,
)
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler, random_bits

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
        self._shares.next = shares
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
        workers, data = self.workers, cast("Dataset[list[MicroBatch]]", self.data)
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


class OwnShares:
    """A rank's shares of the steps of one loop, in the order of its sampler; not collective.

    Attributes:
        workers: how many processes load them.
        waited_sec: how long the last share was waited for.
    """

    def __init__(
        self,
        loader: ShareLoader,
        sampler: LoadAdaptiveSampler,
        parts_of: Callable[[list[int]], list[tuple[int, list[int]]]],
        seed: int,
        rank: int,
        ranks: int,
    ) -> None:
        """Load nothing yet; `parts_of` divides a share's indices into micro-batches."""
        self.workers = loader.workers
        self.waited_sec = 0.0
        self._loader = loader
        self._sampler = sampler
        self._parts_of = parts_of
        self._seed = seed
        self._rank = rank
        self._ranks = ranks
        self._loading: Iterator[list[MicroBatch]] | None = None

    @property
    def are_loading(self) -> bool:
        """Whether the next share continues those before, wherever the run is."""
        return self._loading is not None

    def next(self, epoch: int, position: int) -> list[MicroBatch] | None:
        """Return the next share; None at the end of the epoch.

        Unless shares are loading, the next one begins at a position in an epoch.
        """
        waiting_since = time.perf_counter()
        if self._loading is None:
            self._go_to(epoch)
            self._sampler.position = position
            self._loading = self._loader.load(self._share(indices) for indices in self._sampler)
        parts = next(self._loading, None)
        if parts is None:
            self._loading = None
        self.waited_sec = time.perf_counter() - waiting_since
        return parts

    def drop(self) -> None:
        """Forget the shares that are loading."""
        self._loading = None

    def first(self, epoch: int, count: int) -> list[list[int]]:
        """Go to an epoch; return the indices of this rank's shares of its first samples."""
        self._go_to(epoch)
        return list(self._sampler.first_shares(count))

    def read(self, indices: list[int]) -> list[MicroBatch]:
        """Read a share in this process."""
        return self._loader.data[self._share(indices)]

    def _go_to(self, epoch: int) -> None:
        set_epoch_of(self._loader.batches, epoch)
        self._sampler.set_epoch(epoch)

    def _share(self, indices: list[int]) -> Share:
        """Return what to load for the step with these samples, which the sampler is at."""
        place = self._sampler.position * self._ranks + self._rank
        seed = int(random_bits(self._seed, self._sampler.epoch, [place])[0]) & 0xFFFF_FFFF
        return Share(self._sampler.epoch, seed, self._parts_of(indices))


class _Shares(Sampler[Share]):
    """Yields the shares to load next; a `DataLoader` keeps its sampler."""

    next: Iterator[Share]

    def __iter__(self) -> Iterator[Share]:
        return self.next


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
    """Return how many steps ahead of training a loader with these workers fetches batches.

    A plan that is set between two steps takes effect after the batches fetched ahead.
    """
    return workers * _BATCHES_PER_WORKER
