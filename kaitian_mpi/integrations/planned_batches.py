"""Divides the batches of a script's own loader by the plan, whatever trainer iterates over it."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from kaitian_mpi.integrations.taken_batches import BatchRows, Iteration

Iterate = Callable[[DataLoader], Iterator[Any]]
"""`DataLoader.__iter__`."""
_OUTER_LOADERS = (
    ("accelerate.data_loader", "DataLoaderShard"),
    ("timm.data.loader", "PrefetchLoader"),
)
"""Loaders that prefetch a torch loader's batches, and yield them in the same order."""
_EQUAL_SHAPES = "RepeatSampler"  # of TRL's trainers that generate, such as GRPO


class _StepBatch(NamedTuple):
    """The rows of a step's batch, as indices of samples."""

    rank_rows: list[int] | None
    """This rank's, by its original sampler; None if that yields none."""
    all_rows: list[int]
    """The rows of all ranks."""


class BatchPlanner(Protocol):
    """The plan, as a `PlannedBatchSampler` uses it."""

    rank: int
    size: int

    def divide(self, sampler: PlannedBatchSampler, rows: int) -> list[int]:
        """Return how many rows of a batch each rank takes."""

    def is_training(self) -> bool:
        """Return whether a model is in training mode, such as before its first batch."""

    def has_new_plan(self) -> bool:
        """Return whether the shares have changed since the last call. Collective."""

    def batch_taken(self, iteration: Iteration, rows: BatchRows, batch: Any) -> None:
        """Record that the script has taken a batch."""

    def unplanned_loader_iterated(self, is_stream: bool) -> None:
        """Record that the script iterates over a loader that does not follow the plan."""


class PlannedBatchSampler(BatchSampler):
    """A loader's batch sampler, which divides the rows of each step over the ranks by the plan.

    A step has the rows of all ranks' original batches. Each rank takes its share of them, at least
    one row, in rank order. So full batches and epochs are as large as without a plan. The last,
    partial batch is divided likewise, without duplicates. A loader that does not train, or not yet,
    yields the batches of its original batch sampler.
    """

    refusal = ""
    """Why this loader's batches cannot be divided, and what to do; empty if they can."""

    def __init__(
        self, original: Any, rank_rows: int, planner: BatchPlanner, skipped: int = 0
    ) -> None:
        """Divide the batches that all ranks' `original` batch samplers yield, each of `rank_rows`.

        The first `skipped` batches are left out.
        """
        self._original = original
        self.rank_rows = rank_rows
        self._planner = planner
        self._skipped = skipped
        self.trains = False
        """Whether a model has been trained on this loader's batches."""
        self._epoch: _Epoch | None = None
        self._outer_rows: deque[BatchRows] | None = None  # of batches in a trainer's own loader

    def begin_training(self) -> None:
        """Follow the plan from the next batch on: a model is trained on this loader's batches."""
        self.trains = True

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the original batch sampler, such as `sampler`."""
        if name == "_original":  # of a copy that is not complete yet
            raise AttributeError(name)
        return getattr(self._original, name)

    def __len__(self) -> int:
        return len(self._original) - self._skipped

    def __iter__(self) -> Iterator[list[int]]:
        """Return the batches not yet yielded in this epoch, for the loader to fetch."""
        if self._epoch is None:
            return itertools.islice(self._original, self._skipped, None)
        return self._rows(self._epoch)

    def _rows(self, epoch: _Epoch) -> Iterator[list[int]]:
        again = [batch for batch, _ in epoch.fetched]
        epoch.fetched.clear()
        for batch in itertools.chain(again, epoch.batches):
            if batch.rank_rows is None and not self._is_divided(batch):
                return
            indices, rows = self._take(batch)
            epoch.fetched.append((batch, rows))
            yield indices

    def iterate(self, loader: DataLoader, iterate: Iterate) -> Iterator[Any]:
        """Yield the loader's batches.

        A new plan applies to the next batch: prefetched ones are fetched again by the same workers.
        """
        iteration, outer_rows = Iteration(self), self._outer_rows
        self._outer_rows = None
        epoch = _Epoch(itertools.islice(self._all_batches(), self._skipped, None))
        inner: Any = None
        trained = self.trains
        try:
            while True:
                is_new = self.trains and self._planner.has_new_plan()
                if inner is None or is_new or trained != self.trains:
                    self._epoch = epoch
                    trained = self.trains
                    if inner is None:
                        inner = iterate(loader)
                    else:
                        inner._reset(loader)  # as torch does at each epoch of persistent workers
                try:
                    batch = next(inner)
                except StopIteration:
                    return
                _, rows = epoch.fetched.popleft()
                if outer_rows is None:
                    self._planner.batch_taken(iteration, rows, batch)
                else:
                    outer_rows.append(rows)
                yield batch
        finally:
            iteration.close()
            if self._epoch is epoch:
                self._epoch = None

    def iterate_outer(self, batches: Iterator[Any], skipped: int) -> Iterator[Any]:
        """Yield the batches of a trainer's own loader, which takes those of `iterate` in order.

        Args:
            batches: the trainer's, which may be prefetched and copied to a device.
            skipped: how many batches the trainer skips at first.
        """
        iteration, rows = Iteration(self), deque[BatchRows]()
        self._outer_rows = rows
        try:
            for number, batch in enumerate(batches):
                for _ in range(0 if number else skipped):
                    rows.popleft()
                self._planner.batch_taken(iteration, rows.popleft(), batch)
                yield batch
        finally:
            iteration.close()

    def _all_batches(self) -> Iterator[_StepBatch]:
        """Yield the batches of an epoch."""
        raise NotImplementedError

    def _is_divided(self, batch: _StepBatch) -> bool:
        """Return whether a batch is divided by the plan, and not as by the original samplers.

        Before training both are equal for a full batch. A partial one may be first, after a resume.
        """
        return self.trains or (self._is_partial(batch) and self._planner.is_training())

    def _is_partial(self, batch: _StepBatch) -> bool:
        return len(batch.all_rows) < self.rank_rows * self._planner.size

    def _take(self, batch: _StepBatch) -> tuple[list[int], BatchRows]:
        """Return this rank's rows of a batch, as indices, and how many rows the ranks have."""
        if not self._is_divided(batch):
            indices = batch.rank_rows or []
            is_padded = self._is_partial(batch)
            return indices, BatchRows(len(indices), len(indices) * self._planner.size, is_padded)
        shares = self._planner.divide(self, len(batch.all_rows))
        rank = self._planner.rank
        start = sum(shares[:rank])
        indices = batch.all_rows[start : start + shares[rank]] or batch.all_rows[:1]
        return indices, BatchRows(shares[rank], sum(shares))


class _Epoch:
    """An iteration over a loader."""

    def __init__(self, batches: Iterator[_StepBatch]) -> None:
        self.batches = batches
        self.fetched: deque[tuple[_StepBatch, BatchRows]] = deque()
        """The batches that the loader has fetched, but not yielded yet."""


class _PlannedDistributedSampler(PlannedBatchSampler):
    """Divides batches of torch's `DistributedSampler`; Lightning puts one into each loader."""

    def __init__(self, loader: DataLoader, planner: BatchPlanner) -> None:
        assert loader.batch_size is not None
        super().__init__(loader.batch_sampler, loader.batch_size, planner)
        self._sampler: Any = loader.sampler

    def _all_batches(self) -> Iterator[_StepBatch]:
        whole: Any = copy.copy(self._sampler)
        whole.num_replicas = 1
        whole.rank = 0
        # Without `drop_last`, which drops the remainder of a division by the ranks, the original
        # sampler would repeat rows instead.
        count = self._sampler.total_size if whole.drop_last else len(whole.dataset)
        whole.num_samples = whole.total_size = count
        order = list(whole)
        # The ranks' samplers are padded to equal lengths, so there may be one step more.
        step = self.rank_rows * self._planner.size
        for index, rank_rows in enumerate(self._original):
            yield _StepBatch(rank_rows, order[index * step : (index + 1) * step] or order[:1])


class _PlannedShardSampler(PlannedBatchSampler):
    """Divides batches of Accelerate's `BatchSamplerShard` (data_loader.py), as Hugging Face's."""

    def __init__(self, shard: Any, planner: BatchPlanner, skipped: int = 0) -> None:
        super().__init__(shard, shard.batch_size or 1, planner, skipped)
        sampler = type(getattr(shard.batch_sampler, "sampler", None)).__name__
        if shard.split_batches:
            self.refusal = (
                "--adaptive divides the batches of all ranks itself; leave out Accelerate's "
                "split_batches"
            )
        elif type(shard.batch_sampler) is not BatchSampler:
            self.refusal = (
                "--adaptive divides batches of torch's BatchSampler, but this loader has a "
                f"{type(shard.batch_sampler).__name__}; leave out --adaptive"
            )
        elif sampler == _EQUAL_SHAPES:
            self.refusal = (
                "--adaptive does not work with a trainer that gathers equal batches from the "
                f"ranks ({sampler}: GRPO and its like); leave out --adaptive"
            )

    def _all_batches(self) -> Iterator[_StepBatch]:
        batches, same = itertools.tee(self._original.batch_sampler)
        shard = copy.copy(self._original)  # yields this rank's rows in the same order
        shard.batch_sampler = _Replay(self._original.batch_sampler, same)
        rank_batches = iter(shard)
        while step_batches := list(itertools.islice(batches, self._planner.size)):
            all_rows = [row for rows in step_batches for row in rows]
            if self._original.drop_last and len(all_rows) < self.rank_rows * self._planner.size:
                return
            yield _StepBatch(next(rank_batches, None), all_rows)


class _Replay(BatchSampler):
    """Replays batches that have been drawn from a batch sampler; else is like that."""

    def __init__(self, sampler: Any, batches: Iterator[list[int]]) -> None:
        self._sampler = sampler
        self._batches = batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches


def plan_loaders(planner: BatchPlanner) -> Callable[[], None]:
    """Make every loader that is created from now on follow the plan.

    Returns:
        A function that undoes this.
    """
    create, iterate = DataLoader.__init__, DataLoader.__iter__
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
    if "accelerate" in sys.modules and "accelerate" not in restores:
        from kaitian_mpi.integrations.accelerate_calls import extend_accelerate

        restores["accelerate"] = extend_accelerate()


def _extend_outer_loader(loader: Any) -> Callable[[], None]:
    """Let a trainer's loader class report its batches as those of torch's loader inside it."""
    iterate = loader.__iter__

    @functools.wraps(iterate)
    def iterate_outer(self: Any) -> Iterator[Any]:
        inner = getattr(self, "base_dataloader", None) or getattr(self, "loader", None)
        sampler = getattr(inner, "batch_sampler", None)
        if not isinstance(sampler, PlannedBatchSampler):
            return iterate(self)
        return sampler.iterate_outer(iterate(self), getattr(self, "skip_batches", 0))

    def restore() -> None:
        loader.__iter__ = iterate

    loader.__iter__ = iterate_outer
    return restore


def _planned_sampler_for(loader: DataLoader, planner: BatchPlanner) -> PlannedBatchSampler | None:
    """Return the sampler by which a loader follows the plan; None if it cannot."""
    original: Any = loader.batch_sampler
    if not getattr(loader, "in_order", True):
        return None  # its batches come as they are ready
    sampler: PlannedBatchSampler
    if type(loader.sampler) is DistributedSampler and type(original) is BatchSampler:
        place = loader.sampler.rank, loader.sampler.num_replicas
        sampler = _PlannedDistributedSampler(loader, planner)
    elif type(original).__name__ == "BatchSamplerShard":
        place = original.process_index, original.num_processes
        sampler = _PlannedShardSampler(original, planner)
    # Of Accelerate, to continue in the middle of an epoch.
    elif type(original).__name__ == "SkipBatchSampler" and isinstance(
        original.batch_sampler, _PlannedShardSampler
    ):
        shard = original.batch_sampler._original
        place = shard.process_index, shard.num_processes
        sampler = _PlannedShardSampler(shard, planner, original.skip_batches)
    else:
        return None
    # A loader of a group of ranks, as for tensor parallelism, is not this job's data parallelism.
    return sampler if place == (planner.rank, planner.size) else None
