"""Divides the batches of a loader whose rows have indices, whatever trainer iterates over it."""

from __future__ import annotations

import copy
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from torch.utils.data import BatchSampler, DataLoader

from kaitian_mpi.errors import AgreedError
from kaitian_mpi.integrations.adaptive_plan import AdaptivePlan
from kaitian_mpi.integrations.taken_batches import BatchRows, Iteration

Iterate = Callable[[DataLoader], Iterator[Any]]
"""`DataLoader.__iter__`."""
_MAY_BE_MIXED = "rows_may_be_mixed"
"""The attribute by which a script's batch sampler allows to divide its batches."""
_EQUAL_SHAPES = "RepeatSampler"  # of TRL's trainers that generate, such as GRPO


class _StepBatch(NamedTuple):
    """The rows of a step's batch, as indices of samples."""

    rank_rows: list[int] | None
    """This rank's, by its original sampler; None if that yields none."""
    all_rows: list[int]
    """The rows of all ranks."""
    is_partial: bool
    """Whether it has fewer rows than the ranks' full batches, so that the original repeats some."""
    whole: list[list[int]]
    """The batches that stay whole; none if their rows are divided."""


class BatchPlanner(Protocol):
    """The plan, as a `PlannedBatchSampler` uses it."""

    rank: int
    size: int

    def plan_of(self, sampler: PlannedBatchSampler) -> AdaptivePlan:
        """Return the plan that divides a loader's batches; an equal one before it trains."""

    def is_training(self) -> bool:
        """Return whether a model is in training mode, such as before its first batch."""

    def has_new_plan(self) -> bool:
        """Return whether the shares have changed since the last call. Collective."""

    def gather_numbers(self, number: int) -> list[int]:
        """Return every rank's number. Collective."""

    def say(self, text: str) -> None:
        """Print a line on rank 0, once. Not collective."""

    def batch_taken(self, iteration: Iteration, rows: BatchRows, batch: Any) -> None:
        """Record that the script has taken a batch."""

    def unplanned_loader_iterated(self, is_stream: bool) -> None:
        """Record that the script iterates over a loader that does not follow the plan."""


class PlannedBatchSampler(BatchSampler):
    """A loader's batch sampler, which divides the rows of each step over the ranks by the plan.

    A step has the rows of all ranks' original batches. Each rank takes its share of them, at least
    one row. So full batches and epochs are as large as without a plan. A loader that does not
    train, or not yet, yields the batches of its original batch sampler.
    """

    refusal = ""
    """Why this loader's batches cannot be divided, and what to do; empty if they can."""
    may_end_early = False
    """Whether it may have fewer batches on a rank than on others."""

    def __init__(self, original: Any, rank_rows: int, planner: BatchPlanner) -> None:
        """Divide what all ranks' `original` batch samplers yield, batches of `rank_rows`."""
        self.original = original
        """The script's batch sampler."""
        self.rank_rows = rank_rows
        self._planner = planner
        self.trains = False
        """Whether a model has been trained on this loader's batches."""
        self._outer_rows: deque[BatchRows] | None = None  # of batches in a trainer's own loader

    def begin_training(self) -> None:
        """Follow the plan from the next batch on: a model is trained on this loader's batches."""
        self.trains = True

    def position(self) -> str:
        """Return which batch of this loader is the latest, where ranks may differ in that."""
        return "the first batch of a loader"

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the original batch sampler, such as `sampler`."""
        if name == "original":  # of a copy that is not complete yet
            raise AttributeError(name)
        return getattr(self.original, name)

    def __len__(self) -> int:
        return len(self.original)

    def iterate(self, loader: DataLoader, iterate: Iterate) -> Iterator[Any]:
        """Yield the loader's batches."""
        raise NotImplementedError

    def iterate_outer(self, batches: Iterator[Any], skipped: int) -> Iterator[Any]:
        """Yield the batches of a trainer's own loader, which takes those of `iterate` in order.

        Args:
            batches: the trainer's, which may be prefetched and copied to a device.
            skipped: how many batches the trainer skips at first.
        """
        iteration = Iteration(self)
        rows = deque[BatchRows]()
        self._outer_rows = rows
        try:
            for number, batch in enumerate(batches):
                for _ in range(0 if number else skipped):
                    rows.popleft()
                self._planner.batch_taken(iteration, rows.popleft(), batch)
                yield batch
        finally:
            iteration.close()


class _IndexBatchSampler(PlannedBatchSampler):
    """Divides batches of indices, in rank order; the last, partial one likewise."""

    def __init__(
        self, original: Any, rank_rows: int, planner: BatchPlanner, skipped: int = 0
    ) -> None:
        """Divide the ranks' batches, without the first `skipped` ones."""
        super().__init__(original, rank_rows, planner)
        self._skipped = skipped
        self._has_custom_batches = False
        self._epoch: _Epoch | None = None

    def __len__(self) -> int:
        return len(self.original) - self._skipped

    def __iter__(self) -> Iterator[list[int]]:
        """Return the batches not yet yielded in this epoch, for the loader to fetch."""
        if self._epoch is None:
            return itertools.islice(self.original, self._skipped, None)
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
        iteration = Iteration(self)
        outer_rows = self._outer_rows
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
                step_batch, rows = epoch.fetched.popleft()
                if self.trains and self._has_custom_batches:
                    self._check_same(step_batch)
                if outer_rows is None:
                    self._planner.batch_taken(iteration, rows, batch)
                else:
                    outer_rows.append(rows)
                yield batch
        finally:
            iteration.close()
            if self._epoch is epoch:
                self._epoch = None

    def _check_same(self, batch: _StepBatch) -> None:
        """Check that all ranks' samplers have yielded the same batches. Collective."""
        checksum = zlib.crc32(repr(batch.all_rows).encode())
        if len(set(self._planner.gather_numbers(checksum))) > 1:
            raise AgreedError(
                "--adaptive: the ranks' batch samplers yield different batches; seed them alike"
            )

    def _all_batches(self) -> Iterator[_StepBatch]:
        """Yield the batches of an epoch."""
        raise NotImplementedError

    def _is_divided(self, batch: _StepBatch) -> bool:
        """Return whether a batch is divided by the plan, and not as by the original samplers.

        Before training both are equal for a full batch. A partial one may be first, after a resume.
        """
        return self.trains or (batch.is_partial and self._planner.is_training())

    def _take(self, batch: _StepBatch) -> tuple[list[int], BatchRows]:
        """Return this rank's rows of a batch, as indices, and how many rows the ranks have."""
        if not self._is_divided(batch):
            indices = batch.rank_rows or []
            all_ranks = 0 if self._has_custom_batches else len(indices) * self._planner.size
            return indices, BatchRows(len(indices), all_ranks, batch.is_partial)
        rank = self._planner.rank
        if batch.whole:
            dealt = deal_batches(batch.whole, self._planner.plan_of(self).shares)
            rows = BatchRows(len(dealt[rank]), len(batch.all_rows))
            return dealt[rank] or batch.all_rows[:1], rows
        shares = self._planner.plan_of(self).divide(len(batch.all_rows))
        start = sum(shares[:rank])
        indices = batch.all_rows[start : start + shares[rank]] or batch.all_rows[:1]
        return indices, BatchRows(shares[rank], sum(shares))


def deal_batches(batches: list[list[int]], shares: list[int]) -> list[list[int]]:
    """Return a batch for each rank: the larger its share, the larger the batch."""
    ranks = sorted(range(len(shares)), key=lambda rank: -shares[rank])
    largest_first = sorted(batches, key=len, reverse=True)
    dealt: list[list[int]] = [[] for _ in shares]
    for rank, batch in zip(ranks, largest_first, strict=False):
        dealt[rank] = batch
    return dealt


class _Epoch:
    """An iteration over a loader."""

    def __init__(self, batches: Iterator[_StepBatch]) -> None:
        self.batches = batches
        self.fetched: deque[tuple[_StepBatch, BatchRows]] = deque()
        """The batches that the loader has fetched, but not yielded yet."""


class PlannedDistributedSampler(_IndexBatchSampler):
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
        for index, rank_rows in enumerate(self.original):
            rows = order[index * step : (index + 1) * step] or order[:1]
            yield _StepBatch(rank_rows, rows, len(rows) < step, whole=[])


class PlannedShardSampler(_IndexBatchSampler):
    """Divides batches of Accelerate's `BatchSamplerShard` (data_loader.py), as Hugging Face's."""

    def __init__(self, shard: Any, planner: BatchPlanner, skipped: int = 0) -> None:
        super().__init__(shard, shard.batch_size or 1, planner, skipped)
        self._has_rank_rows = False
        batches = shard.batch_sampler
        self._has_custom_batches = type(batches) is not BatchSampler
        self._stay_whole = self._has_custom_batches and not getattr(batches, _MAY_BE_MIXED, False)
        sampler = type(getattr(batches, "sampler", None)).__name__
        if shard.split_batches:
            self.refusal = (
                "--adaptive divides the batches of all ranks itself; leave out Accelerate's "
                "split_batches"
            )
        elif sampler == _EQUAL_SHAPES:
            self.refusal = (
                "--adaptive does not work with a trainer that gathers equal batches from the "
                f"ranks ({sampler}: GRPO and its like); leave out --adaptive"
            )

    def begin_training(self) -> None:
        """Follow the plan from the next batch on; say how custom batches do."""
        super().begin_training()
        name = type(self.original.batch_sampler).__name__
        if self._stay_whole:
            self._planner.say(
                f"adaptive: the batches of {name} stay whole, the largest for the fastest rank; "
                f"set its attribute {_MAY_BE_MIXED} = True if rows of a step's batches may be mixed"
            )
        elif self._has_custom_batches:
            self._planner.say(
                f"adaptive: the rows of a step's batches of {name} are divided by the plan"
            )

    def _all_batches(self) -> Iterator[_StepBatch]:
        batches, same = itertools.tee(self.original.batch_sampler)
        shard = copy.copy(self.original)  # yields this rank's rows in the same order
        shard.batch_sampler = _Replay(self.original.batch_sampler, same)
        rank_batches = iter(shard)
        is_short = False
        while step_batches := list(itertools.islice(batches, self._planner.size)):
            if is_short:
                raise AgreedError(
                    "--adaptive: Accelerate leaves out batches of other sizes than the batch_size "
                    f"of {type(self.original.batch_sampler).__name__}; remove that attribute"
                )
            all_rows = [row for rows in step_batches for row in rows]
            if self.original.batch_size is None:
                self._set_rank_rows(len(all_rows), len(step_batches))
                is_partial = len(step_batches) < self._planner.size
            else:
                is_partial = len(all_rows) < self.rank_rows * self._planner.size
                is_short = self._has_custom_batches and is_partial
            if self.original.drop_last and is_partial:
                return
            whole = step_batches if self._stay_whole else []
            yield _StepBatch(next(rank_batches, None), all_rows, is_partial, whole)

    def _set_rank_rows(self, rows: int, batches: int) -> None:
        """Take the mean size of the first step's batches for that of all, if they have no size."""
        if not self._has_rank_rows:
            self._has_rank_rows = True
            self.rank_rows = max(1, rows // batches)


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
