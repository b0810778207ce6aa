"""Cuts the batches of a script's own loader by the plan, whatever trainer iterates over it."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from kaitian_mpi.integrations.taken import Given, Iteration

Iterate = Callable[[DataLoader], Iterator[Any]]
"""`DataLoader.__iter__`."""
_OUTER_LOADERS = (
    ("accelerate.data_loader", "DataLoaderShard"),
    ("timm.data.loader", "PrefetchLoader"),
)
"""Loaders that take a torch loader's batches ahead, and give them in that order."""
_EQUAL_SHAPES = "RepeatSampler"  # of TRL's trainers that generate, such as GRPO


class _Batch(NamedTuple):
    """The rows of a step's batch."""

    own: list[int] | None
    """This rank's, as its own sampler gives them; None if that gives it none."""
    whole: list[int]
    """Those of all ranks."""


class Divider(Protocol):
    """What a cut asks of the plan."""

    rank: int
    size: int

    def divide(self, cut: Cut, rows: int) -> list[int]:
        """Return how many rows of a batch each rank takes."""

    def is_training(self) -> bool:
        """Return whether a model is in training mode, such as before its first batch."""

    def has_new_plan(self) -> bool:
        """Return whether the shares have changed since the last call. Collective."""

    def gives(self, iteration: Iteration, given: Given, batch: Any) -> None:
        """Take note that the script takes a batch."""

    def gives_uncut(self, is_stream: bool) -> None:
        """Take note that the script iterates over a loader that is not cut."""


class Cut(BatchSampler):
    """A loader's batch sampler: cuts the rows that all ranks take in a step by the plan.

    A batch of all ranks is what the ranks' own batches would have been together. Each rank takes
    its share of it, at least one row, in rank order. So a full batch has as many rows, an epoch as
    many batches, as without a plan; the last, partial batch is divided likewise, with no row twice.
    A loader that does not train, or not yet, gives the batches of its own batch sampler.
    """

    refusal = ""
    """Why this loader's batches cannot be cut, and what to do; empty if they can."""

    def __init__(self, own: Any, rows: int, planner: Divider, skipped: int = 0) -> None:
        """Cut what `own`, this rank's batch sampler, would have given in batches of `rows`."""
        self._own = own
        self.rows = rows
        self._planner = planner
        self._skipped = skipped
        self.trains = False
        """Whether a model has been trained on this loader's batches."""
        self._epoch: _Epoch | None = None
        self._passed_on: deque[Given] | None = None  # to a trainer's own loader

    def __getattr__(self, name: str) -> Any:
        """Return what the trainer asks of its own batch sampler, such as `sampler`."""
        if name == "_own":  # of a copy that is not complete yet
            raise AttributeError(name)
        return getattr(self._own, name)

    def __len__(self) -> int:
        return len(self._own) - self._skipped

    def __iter__(self) -> Iterator[list[int]]:
        """Return the batches that have not been given in this epoch, for the loader to fetch."""
        if self._epoch is None:
            return itertools.islice(self._own, self._skipped, None)
        return self._rows(self._epoch)

    def _rows(self, epoch: _Epoch) -> Iterator[list[int]]:
        again = [batch for batch, _ in epoch.fetched]
        epoch.fetched.clear()
        for batch in itertools.chain(again, epoch.batches):
            if batch.own is None and not self._is_divided(batch):
                return
            rows, given = self._take(batch)
            epoch.fetched.append((batch, given))
            yield rows

    def iterate(self, loader: DataLoader, iterate: Iterate) -> Iterator[Any]:
        """Yield the loader's batches.

        A new plan holds from the next one: what has been fetched by an older one is fetched again,
        by the same workers.
        """
        iteration, passed_on = Iteration(self), self._passed_on
        self._passed_on = None
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
                given = epoch.fetched.popleft()[1]
                if passed_on is None:
                    self._planner.gives(iteration, given, batch)
                else:
                    passed_on.append(given)
                yield batch
        finally:
            iteration.close()
            if self._epoch is epoch:
                self._epoch = None

    def pass_on(self, batches: Iterator[Any], skipped: int) -> Iterator[Any]:
        """Yield the batches of a trainer's own loader, which takes those of `iterate` in order.

        Args:
            batches: the trainer's, which may be fetched ahead, and copied to a device.
            skipped: how many the trainer leaves out at first.
        """
        iteration, given = Iteration(self), deque[Given]()
        self._passed_on = given
        try:
            for number, batch in enumerate(batches):
                for _ in range(0 if number else skipped):
                    given.popleft()
                self._planner.gives(iteration, given.popleft(), batch)
                yield batch
        finally:
            iteration.close()

    def _all_batches(self) -> Iterator[_Batch]:
        """Yield the batches of an epoch."""
        raise NotImplementedError

    def _is_divided(self, batch: _Batch) -> bool:
        """Return whether the ranks take their shares of a batch, and not those of their samplers.

        Equal shares of a full batch are the same. A partial one may be the first, after a resume.
        """
        return self.trains or (self._is_partial(batch) and self._planner.is_training())

    def _is_partial(self, batch: _Batch) -> bool:
        return len(batch.whole) < self.rows * self._planner.size

    def _take(self, batch: _Batch) -> tuple[list[int], Given]:
        """Return this rank's rows."""
        if not self._is_divided(batch):
            own = batch.own or []
            is_padded = self._is_partial(batch)
            return own, Given(len(own), len(own) * self._planner.size, is_padded)
        shares = self._planner.divide(self, len(batch.whole))
        rank = self._planner.rank
        start = sum(shares[:rank])
        rows = batch.whole[start : start + shares[rank]] or batch.whole[:1]
        return rows, Given(shares[rank], sum(shares))


class _Epoch:
    """An iteration over a loader."""

    def __init__(self, batches: Iterator[_Batch]) -> None:
        self.batches = batches
        self.fetched: deque[tuple[_Batch, Given]] = deque()
        """What the loader has fetched, and not given yet."""


class _CutDistributedSampler(Cut):
    """Cuts batches of torch's `DistributedSampler`; Lightning puts one into each loader."""

    def __init__(self, loader: DataLoader, planner: Divider) -> None:
        assert loader.batch_size is not None
        super().__init__(loader.batch_sampler, loader.batch_size, planner)
        self._sampler: Any = loader.sampler

    def _all_batches(self) -> Iterator[_Batch]:
        whole: Any = copy.copy(self._sampler)
        whole.num_replicas = 1
        whole.rank = 0
        # Without `drop_last`, which leaves out the rest of a division by the ranks, it would repeat
        # rows for one.
        count = self._sampler.total_size if whole.drop_last else len(whole.dataset)
        whole.num_samples = whole.total_size = count
        order = list(whole)
        # The ranks' samplers are padded to equal lengths, so there may be one step more.
        step = self.rows * self._planner.size
        for index, own in enumerate(self._own):
            yield _Batch(own, order[index * step : (index + 1) * step] or order[:1])


class _CutShard(Cut):
    """Cuts batches of Accelerate's `BatchSamplerShard` (data_loader.py), also Hugging Face's."""

    def __init__(self, shard: Any, planner: Divider, skipped: int = 0) -> None:
        super().__init__(shard, shard.batch_size or 1, planner, skipped)
        sampler = type(getattr(shard.batch_sampler, "sampler", None)).__name__
        if shard.split_batches:
            self.refusal = (
                "--adaptive cuts the batches of all ranks itself; leave out Accelerate's "
                "split_batches"
            )
        elif type(shard.batch_sampler) is not BatchSampler:
            self.refusal = (
                "--adaptive cuts batches of torch's BatchSampler, and this loader has a "
                f"{type(shard.batch_sampler).__name__}; leave out --adaptive"
            )
        elif sampler == _EQUAL_SHAPES:
            self.refusal = (
                "--adaptive does not work with a trainer that gathers equal batches from the "
                f"ranks ({sampler}: GRPO and its like); leave out --adaptive"
            )

    def _all_batches(self) -> Iterator[_Batch]:
        batches, same = itertools.tee(self._own.batch_sampler)
        own = copy.copy(self._own)  # gives this rank the rows of the same order
        own.batch_sampler = _Replay(self._own.batch_sampler, same)
        own_batches = iter(own)
        while few := list(itertools.islice(batches, self._planner.size)):
            whole = [row for each in few for row in each]
            if self._own.drop_last and len(whole) < self.rows * self._planner.size:
                return
            yield _Batch(next(own_batches, None), whole)


class _Replay(BatchSampler):
    """A batch sampler, with batches that have been drawn from it already."""

    def __init__(self, sampler: Any, batches: Iterator[list[int]]) -> None:
        self._sampler = sampler
        self._batches = batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches


def cut_loaders(planner: Divider) -> Callable[[], None]:
    """Cut the batches of every loader that is created from now on; return what ends that."""
    create, iterate = DataLoader.__init__, DataLoader.__iter__
    restores: dict[str, Callable[[], None]] = {}

    @functools.wraps(create)
    def create_and_cut(self: DataLoader, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        cut = _cut_of(self, planner)
        if cut is not None:
            self.__dict__["batch_sampler"] = cut  # DataLoader refuses the usual assignment
            _extend_trainers(restores)

    @functools.wraps(iterate)
    def iterate_over_cut(self: DataLoader) -> Iterator[Any]:
        cut = self.batch_sampler
        if isinstance(cut, Cut):
            return cut.iterate(self, iterate)
        planner.gives_uncut(isinstance(self.dataset, IterableDataset))
        return iterate(self)

    def restore() -> None:
        while restores:
            restores.popitem()[1]()
        DataLoader.__init__ = create  # type: ignore[method-assign]
        DataLoader.__iter__ = iterate  # type: ignore[method-assign]

    DataLoader.__init__ = create_and_cut  # type: ignore[method-assign]
    DataLoader.__iter__ = iterate_over_cut  # type: ignore[assignment, method-assign]
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
    """Make the batches of a trainer's loader, a class, known as those of torch's within it."""
    iterate = loader.__iter__

    @functools.wraps(iterate)
    def pass_on(self: Any) -> Iterator[Any]:
        inner = getattr(self, "base_dataloader", None) or getattr(self, "loader", None)
        cut = getattr(inner, "batch_sampler", None)
        if not isinstance(cut, Cut):
            return iterate(self)
        return cut.pass_on(iterate(self), getattr(self, "skip_batches", 0))

    def restore() -> None:
        loader.__iter__ = iterate

    loader.__iter__ = pass_on
    return restore


def _cut_of(loader: DataLoader, planner: Divider) -> Cut | None:
    own: Any = loader.batch_sampler
    if not getattr(loader, "in_order", True):
        return None  # its batches come as they are ready
    cut: Cut | None = None
    if type(loader.sampler) is DistributedSampler and type(own) is BatchSampler:
        ranks = loader.sampler.rank, loader.sampler.num_replicas
        cut = _CutDistributedSampler(loader, planner)
    elif type(own).__name__ == "BatchSamplerShard":
        ranks = own.process_index, own.num_processes
        cut = _CutShard(own, planner)
    # Of Accelerate, to continue in the middle of an epoch.
    elif type(own).__name__ == "SkipBatchSampler" and isinstance(own.batch_sampler, _CutShard):
        shard = own.batch_sampler._own
        ranks = shard.process_index, shard.num_processes
        cut = _CutShard(shard, planner, own.skip_batches)
    # Of a group of ranks, as for tensor parallelism, it is not this job's data parallelism.
    return cut if cut is not None and ranks == (planner.rank, planner.size) else None
