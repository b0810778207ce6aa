"""Makes the loaders of a script follow the plan, when they are created and iterated over."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from kaitian_mpi.integrations.planned_batches import (
    BatchPlanner,
    PlannedBatchSampler,
    PlannedDistributedSampler,
    PlannedShardSampler,
)
from kaitian_mpi.integrations.planned_streams import PlannedStream, SharedStream, is_divisible

_OUTER_LOADERS = (
    ("accelerate.data_loader", "DataLoaderShard"),
    ("timm.data.loader", "PrefetchLoader"),
)
"""Loaders that prefetch a torch loader's batches, and yield them in the same order."""
_DISPATCHER = "DataLoaderDispatcher"  # of Accelerate


def plan_loaders(planner: BatchPlanner) -> Callable[[], None]:
    """Make every loader that is created from now on follow the plan.

    Returns:
        A function that undoes this.
    """
    create = DataLoader.__init__
    iterate = DataLoader.__iter__
    restores: dict[str, Callable[[], None]] = {}

    @functools.wraps(create)
    def create_planned(self: DataLoader, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        sampler = _planned_sampler_for(self, planner)
        if sampler is not None:
            self.__dict__["batch_sampler"] = sampler  # DataLoader refuses the usual assignment
            _extend_trainers(restores)

    @functools.wraps(iterate)
    def iterate_planned(self: DataLoader) -> Iterator[Any]:
        sampler = self.batch_sampler
        if isinstance(sampler, PlannedBatchSampler):
            return sampler.iterate(self, iterate)
        planner.unplanned_loader_iterated(isinstance(self.dataset, IterableDataset))
        return iterate(self)

    def restore() -> None:
        while restores:
            restores.popitem()[1]()
        DataLoader.__init__ = create  # type: ignore[method-assign]
        DataLoader.__iter__ = iterate  # type: ignore[method-assign]

    DataLoader.__init__ = create_planned  # type: ignore[method-assign]
    DataLoader.__iter__ = iterate_planned  # type: ignore[assignment, method-assign]
    return restore


def _extend_trainers(restores: dict[str, Callable[[], None]]) -> None:
    """Extend the loaders and calls of trainers that are imported by now, each once."""
    for module, name in _OUTER_LOADERS:
        loader = getattr(sys.modules.get(module), name, None)
        if loader is not None and name not in restores:
            restores[name] = _extend_outer_loader(loader)
    dispatcher = getattr(sys.modules.get("accelerate.data_loader"), _DISPATCHER, None)
    if dispatcher is not None and _DISPATCHER not in restores:
        restores[_DISPATCHER] = _leave_dispatched_streams(dispatcher)
    if "accelerate" in sys.modules and "accelerate" not in restores:
        from kaitian_mpi.integrations.accelerate_calls import extend_accelerate

        restores["accelerate"] = extend_accelerate()


def _extend_outer_loader(loader: Any) -> Callable[[], None]:
    """Let a trainer's loader class report its batches as those of torch's loader inside it."""
    iterate = loader.__iter__

    @functools.wraps(iterate)
    def iterate_outer(self: Any) -> Iterator[Any]:
        inner = getattr(self, "base_dataloader", None)
        if inner is None:  # not by its truth, which asks for the length
            inner = getattr(self, "loader", None)
        sampler = getattr(inner, "batch_sampler", None)
        if not isinstance(sampler, PlannedBatchSampler):
            return iterate(self)
        return sampler.iterate_outer(iterate(self), getattr(self, "skip_batches", 0))

    def restore() -> None:
        loader.__iter__ = iterate

    loader.__iter__ = iterate_outer
    return restore


def _leave_dispatched_streams(loader: Any) -> Callable[[], None]:
    """Let a loader that rank 0 reads for all ranks have the script's own batches."""
    iterate = loader.__iter__

    @functools.wraps(iterate)
    def iterate_unplanned(self: Any) -> Iterator[Any]:
        sampler = self.base_dataloader.batch_sampler
        if isinstance(sampler, PlannedStream):
            vars(self.base_dataloader)["batch_sampler"] = sampler.original
        return iterate(self)

    def restore() -> None:
        loader.__iter__ = iterate

    loader.__iter__ = iterate_unplanned
    return restore


def _planned_sampler_for(loader: DataLoader, planner: BatchPlanner) -> PlannedBatchSampler | None:
    """Return the sampler by which a loader follows the plan; None if it cannot."""
    original: Any = loader.batch_sampler
    if not getattr(loader, "in_order", True):
        return None  # its batches come as they are ready
    sampler: PlannedBatchSampler
    if isinstance(loader.dataset, IterableDataset):
        return _planned_stream_for(loader, planner)
    if type(loader.sampler) is DistributedSampler and type(original) is BatchSampler:
        place = loader.sampler.rank, loader.sampler.num_replicas
        sampler = PlannedDistributedSampler(loader, planner)
    elif type(original).__name__ == "BatchSamplerShard":
        place = original.process_index, original.num_processes
        sampler = PlannedShardSampler(original, planner)
    # Of Accelerate, to continue in the middle of an epoch.
    elif type(original).__name__ == "SkipBatchSampler" and isinstance(
        original.batch_sampler, PlannedShardSampler
    ):
        shard = original.batch_sampler.original
        place = shard.process_index, shard.num_processes
        sampler = PlannedShardSampler(shard, planner, original.skip_batches)
    else:
        return None
    # A loader of a group of ranks, as for tensor parallelism, is not this job's data parallelism.
    return sampler if place == (planner.rank, planner.size) else None


def _planned_stream_for(loader: DataLoader, planner: BatchPlanner) -> PlannedBatchSampler | None:
    """Return the same of a loader whose data set has no index."""
    if not is_divisible(loader):
        return None
    shard: Any = loader.dataset
    if type(shard).__name__ != "IterableDatasetShard":  # of Accelerate
        return PlannedStream(loader, planner)
    place = shard.process_index, shard.num_processes
    makes_its_batches = shard.split_batches or shard.batch_size == loader.batch_size
    is_planned = place == (planner.rank, planner.size) and makes_its_batches
    return SharedStream(loader, planner) if is_planned else None
