"""Divides the batches of a loader of a stream, which has rows in an order, but no index.

A worker reads as many rows as it is asked for, and what has been read cannot be read again. So a
new plan holds for the batches that no rank's workers have been asked for yet. How many rows the
ranks have of a batch, and whether any has one, they tell each other when it is taken.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterDataPipe, get_worker_info
from torch.utils.data.dataloader import _DatasetKind

from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.integrations.adaptive_plan import divide_rows
from kaitian_mpi.integrations.planned_batches import BatchPlanner, Iterate, PlannedBatchSampler
from kaitian_mpi.integrations.taken_batches import BatchRows, Iteration


class _RowsRequest(NamedTuple):
    """A request to a worker: the next rows of its stream, divided over some ranks."""

    epoch: int
    shares: list[int]
    rank: int
    """Whose share of the rows is wanted."""
    min_batch: int
    """The fewest rows of a rank if there are fewer rows, but enough for that."""
    is_padded: bool
    """Whether to repeat rows if there are fewer, as Accelerate does."""


class _RowsAnswer(NamedTuple):
    """The rows that were read for a request."""

    this_rank: int
    all_ranks: int
    """The number of rows that were read; 0 at the stream's end."""
    is_padded: bool
    """Whether some of them are repeated."""
    batch: Any
    """This rank's rows, or one as a stand-in, as the script's function collates them."""


class StreamReader:
    """Stands in a loader for its data set, with requests as indices."""

    def __init__(self, stream: Any, drop_last: bool, collate: Callable[[list[Any]], Any]) -> None:
        """Read `stream` from its start at each new epoch."""
        self.stream = stream
        self._drop_last = drop_last
        self._collate = collate
        self._epoch = 0
        self._rows: Iterator[Any] = iter(())
        self._first: list[Any] = []  # the rows of the epoch's first request

    def __getitems__(self, request: _RowsRequest) -> _RowsAnswer:
        """Read the rows of a request."""
        if request.epoch != self._epoch:
            self._epoch = request.epoch
            self._rows = iter(self.stream)
            self._first = []
        row_count = sum(request.shares)
        rows = list(itertools.islice(self._rows, row_count))
        if len(rows) < row_count:
            self._rows = iter(())
            rows = [] if self._drop_last else rows
        self._first = self._first or rows
        is_padded = request.is_padded and 0 < len(rows) < row_count
        if is_padded:
            repeated = itertools.chain(rows, itertools.cycle(self._first))
            rows = list(itertools.islice(repeated, row_count))
        shares = divide_rows(request.shares, request.min_batch, len(rows))
        start = sum(shares[: request.rank])
        rank_rows = rows[start : start + shares[request.rank]]
        batch = rank_rows or self._first[:1]
        return _RowsAnswer(
            len(rank_rows), len(rows), is_padded, self._collate(batch) if batch else None
        )


def _as_read(answer: _RowsAnswer) -> _RowsAnswer:
    """Stand in a loader for the script's function, which the reader has called."""
    return answer


class _InitializeWorker:
    """Calls the script's `worker_init_fn`, which may change its data set in the worker."""

    def __init__(self, initialize: Callable[[int], None]) -> None:
        self._initialize = initialize

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        vars(info)["dataset"] = info.dataset.stream
        self._initialize(worker)


class _StreamEpoch:
    """The shares of an epoch's requests."""

    def __init__(self, number: int, shares: list[int]) -> None:
        self.number = number
        self.requests_answered = 0
        self.batches_taken = 0
        self._plans = [(0, shares)]  # with the first request of each

    def change(self, shares: list[int], ahead: int) -> None:
        """Let new shares hold after the requests that any rank may have made: `ahead` of this."""
        self._plans.append((self.requests_answered + ahead, shares))

    def shares_of(self, request: int) -> list[int]:
        """Return the shares of a request, by its number."""
        return next(shares for first, shares in reversed(self._plans) if first <= request)


class PlannedStream(PlannedBatchSampler):
    """Asks for this rank's share of each batch from its own part of a stream.

    Which part that is, the data set decides itself. If the parts end at different steps, the last
    batches are those of the other ranks; with `drop_last`, the epoch ends at the first of them.
    """

    may_end_early = True

    def __init__(self, loader: DataLoader, planner: BatchPlanner) -> None:
        """Divide the batches that all ranks' loaders would yield."""
        assert loader.batch_size is not None
        super().__init__(loader.batch_sampler, loader.batch_size, planner)
        self._stream: Any = loader.dataset
        self._drop_last = loader.drop_last
        self._stream_epoch = _StreamEpoch(0, [self.rank_rows] * planner.size)
        # Its workers end with the script's loader, and not when garbage is collected: that closes
        # their queues first, and torch would wait 5 s for each of them.
        self._reading_loaders: weakref.WeakKeyDictionary[DataLoader, DataLoader] = (
            weakref.WeakKeyDictionary()
        )
        self._has_told_end = False

    def __iter__(self) -> Iterator[Any]:
        """Return an epoch's requests."""
        epoch = self._stream_epoch
        return (self._request(epoch, epoch.shares_of(number)) for number in itertools.count())

    def position(self) -> str:
        """Return which batch of this loader is the latest: a rank may have no more before it."""
        epoch = self._stream_epoch
        return f"batch {epoch.batches_taken} of iteration {epoch.number} over its part of a stream"

    def iterate(self, loader: DataLoader, iterate: Iterate) -> Iterator[Any]:
        """Yield the loader's batches; a new plan applies to those that are not asked for yet."""
        iteration = Iteration(self)
        outer_rows = self._outer_rows
        self._outer_rows = None
        shares = self._planner.plan_of(self).shares
        epoch = self._stream_epoch = _StreamEpoch(self._stream_epoch.number + 1, shares)
        answers = iterate(self._reading(loader))
        ahead: int | None = None  # requests that any rank makes before it needs the batch
        try:
            while True:
                if self.trains:
                    if ahead is None:
                        prefetched = loader.num_workers * (loader.prefetch_factor or 1)
                        ahead = max(self._planner.gather_numbers(prefetched))
                    if self._planner.has_new_plan():
                        epoch.change(self._planner.plan_of(self).shares, ahead)
                answer = self._next(answers, epoch, loader.num_workers)
                rows = self._rows_of(answer)
                if rows is None:
                    return
                epoch.batches_taken += 1
                if outer_rows is None:
                    self._planner.batch_taken(iteration, rows, answer.batch)
                else:
                    outer_rows.append(rows)
                yield answer.batch
        finally:
            iteration.close()

    def _reading(self, loader: DataLoader) -> DataLoader:
        """Return a loader like the script's whose workers read what they are asked for."""
        reading = self._reading_loaders.get(loader)
        if reading is None or not loader.persistent_workers:
            reading = copy.copy(loader)
            vars(reading).update(
                dataset=StreamReader(self._stream, self._drop_last, loader.collate_fn),
                batch_sampler=self,
                collate_fn=_as_read,
                _dataset_kind=_DatasetKind.Map,
            )
            if loader.worker_init_fn is not None:
                reading.worker_init_fn = _InitializeWorker(loader.worker_init_fn)
            self._reading_loaders[loader] = reading
        return reading

    def _request(self, epoch: _StreamEpoch, shares: list[int]) -> _RowsRequest:
        rank_share = shares[self._planner.rank]
        return _RowsRequest(
            epoch.number, [rank_share], 0, self._planner.plan_of(self).min_batch, False
        )

    def _next(self, answers: Iterator[Any], epoch: _StreamEpoch, workers: int) -> _RowsAnswer:
        """Return the next answer with rows, or the last one if every worker's stream has ended."""
        last = _RowsAnswer(0, 0, False, None)
        for _ in range(max(workers, 1)):  # they are asked in turn
            answer = _RowsAnswer(*next(answers))
            epoch.requests_answered += 1
            if answer.all_ranks:
                return answer
            last = answer if answer.batch is not None else last
        return last

    def _rows_of(self, answer: _RowsAnswer) -> BatchRows | None:
        """Return the ranks' numbers of rows of a batch; None at the end of the epoch.

        Collective once the loader trains. Before that only this rank's rows are known, and the
        epoch ends as the script's own.
        """
        if not self.trains:
            return BatchRows(answer.this_rank, 0) if answer.all_ranks else None
        counts = self._planner.gather_numbers(answer.this_rank)
        ended = [str(rank) for rank, count in enumerate(counts) if not count]
        is_over = len(ended) == len(counts) or (bool(ended) and self._drop_last)
        if ended and len(ended) < len(counts) and not self._has_told_end:
            self._has_told_end = True
            then = "the epoch ends, as drop_last asks for" if is_over else "the others go on"
            self._planner.say(
                f"adaptive: rank {', '.join(ended)} has no {'full batch' if is_over else 'row'} "
                f"left in its part of the stream; {then}"
            )
        if is_over:
            return None
        if answer.batch is None:
            raise UserError(
                "--adaptive: this rank's part of the stream has no row at all, and other ranks "
                "train; give each rank a part"
            )
        return BatchRows(answer.this_rank, sum(counts))


class SharedStream(PlannedStream):
    """Takes this rank's share of each batch from a stream that all ranks read.

    As Accelerate's `IterableDatasetShard` (data_loader.py): every rank reads the batches of all.
    """

    def __init__(self, loader: DataLoader, planner: BatchPlanner) -> None:
        """Divide the batches that all ranks' loaders would yield."""
        super().__init__(loader, planner)
        shard: Any = loader.dataset
        if shard.split_batches:
            self.refusal = (
                "--adaptive divides the batches of all ranks itself; leave out Accelerate's "
                "split_batches"
            )
        self._drop_last = shard.drop_last
        self._stream = copy.copy(shard)  # yields every row
        self._stream.batch_size = self._stream.num_processes = 1
        self._stream.process_index = 0

    def _request(self, epoch: _StreamEpoch, shares: list[int]) -> _RowsRequest:
        is_padded = not (self.trains or self._planner.is_training())
        min_batch = self._planner.plan_of(self).min_batch
        return _RowsRequest(epoch.number, shares, self._planner.rank, min_batch, is_padded)

    def _rows_of(self, answer: _RowsAnswer) -> BatchRows | None:
        if not self.trains:
            rows = BatchRows(answer.this_rank, answer.all_ranks, answer.is_padded)
            return rows if answer.all_ranks else None
        if len(set(self._planner.gather_numbers(answer.all_ranks))) > 1:
            raise AgreedError(
                "--adaptive: the ranks have read different numbers of rows from a stream that all "
                "of them read; make it the same on each rank, as by a seed"
            )
        return BatchRows(answer.this_rank, answer.all_ranks) if answer.all_ranks else None


def is_divisible(loader: DataLoader) -> bool:
    """Return whether the batches of a stream's loader can be divided: the loader makes them."""
    makes_batches = type(loader.batch_sampler) is BatchSampler
    return makes_batches and not isinstance(loader.dataset, IterDataPipe)
