"""Finds the batch of a forward among the batches that a script has taken from its loaders.

A forward's tensors share the memory of a batch, or have the content of one, as after a copy to a
device. Other tensors, such as augmented ones, belong to the batch that the script has taken last,
if it trains on each batch before it takes the next one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kaitian_mpi.errors import AgreedError, UserError

_SAMPLED = 64  # elements of a tensor
_MAX_WAITING = 256  # batches: no script fetches more ahead, but it may skip more
_MIN_OWNERS = 64
_MAX_DEPTH = 2  # of objects in a batch


class BatchRows(NamedTuple):
    """The number of rows that the ranks have of a batch."""

    this_rank: int
    """0 if this rank has a row only as a stand-in, which does not count."""
    all_ranks: int
    """0 if that is not known yet, as of a stream before its loader trains."""
    is_padded: bool = False
    """Whether ranks may have the same rows, as in a partial batch of torch's samplers."""


class Iteration:
    """An iteration of a script over a loader, in the thread that begins it."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        """The loader's `PlannedBatchSampler`."""
        self.thread = threading.get_ident()
        self.waiting: list[TakenBatch] = []
        """The batches without a forward, in the order in which they were taken."""
        self.is_direct: bool | None = None
        """Whether each forward has the batch taken last; None before the first forward."""
        self.batches = 0
        """The number of batches taken so far."""
        self.is_over = False
        """Whether the script takes no more batches."""

    def close(self) -> None:
        """End the iteration: the script takes no more batches."""
        self.is_over = True

    def add(self, taken: TakenBatch) -> None:
        """Add a batch that the script has taken."""
        self.batches += 1
        self.waiting.append(taken)
        del self.waiting[:-_MAX_WAITING]

    def use(self, taken: TakenBatch) -> None:
        """Record a forward of a batch, which may have had others before."""
        if taken not in self.waiting:
            return
        self.is_direct = self.is_direct is not False and taken is self.waiting[-1]
        if self.is_direct:
            self.waiting.clear()  # those before it were skipped
        else:
            self.waiting.remove(taken)

    def guess(self, inputs: Any, others: list[TakenBatch]) -> TakenBatch | None:
        """Return the batch of a forward whose tensors share no batch's memory; None if unknown.

        Args:
            inputs: of the forward.
            others: candidates besides the waiting batches.
        """
        if self.is_direct or (self.is_direct is None and len(self.waiting) == 1):
            return self.waiting[-1]
        candidates = [*self.waiting, *(taken for taken in others if taken.iteration is self)]
        # A tensor that is alike in several batches, such as a mask, identifies none.
        identified: set[TakenBatch] = set()
        for tensor in tensors_in(inputs):
            alike = [taken for taken in candidates if taken.has(tensor)]
            identified.update(alike if len(alike) == 1 else ())
        return identified.pop() if len(identified) == 1 else None


class TakenBatch:
    """A batch that a script has taken."""

    def __init__(
        self, iteration: Iteration, rows: BatchRows, number: int, in_training: bool, batch: Any
    ) -> None:
        self.iteration = iteration
        self.rows = rows
        self.number = number
        """The number of batches taken before, from any loader."""
        self.number_in_epoch = iteration.batches + 1
        self.in_training = in_training
        """Whether a model was in training mode then."""
        # A forward's tensors are compared with these, if it may have one of several batches.
        compares = in_training and not iteration.is_direct
        self._samples = [_sample(tensor) for tensor in tensors_in(batch)] if compares else []

    def count_all(self, rows: int) -> None:
        """Complete the number of rows that all ranks have."""
        self.rows = self.rows._replace(all_ranks=rows)

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of the batch has the content of `tensor`, as far as sampled."""
        shape, values = _sample(tensor)
        return bool(values.numel()) and any(
            shape == batch_shape and _are_same(batch_values.to(values.dtype), values)
            for batch_shape, batch_values in self._samples
        )


class TakenBatches:
    """The batches that a script has taken from its loaders."""

    def __init__(self) -> None:
        self._iterations: list[Iteration] = []  # by the batches that were taken last
        # By the memory of a batch; None if several batches of an iteration share it.
        self._owners: dict[StorageWeakRef, TakenBatch | None] = {}
        self._max_owners = _MIN_OWNERS  # before those whose memory is free are removed
        self._numbers = itertools.count(1)
        self._unplanned = 0  # the number at which training began on a loader without a plan
        self._latest: TakenBatch | None = None  # that a forward has had with gradients
        self._evaluated: TakenBatch | None = None  # that a forward has had without
        self.is_iterated = False
        """Whether the script has iterated over a loader."""
        self.reads_stream = False
        """Whether one of them read an `IterableDataset`."""

    def take(self, iteration: Iteration, rows: BatchRows, batch: Any, in_training: bool) -> None:
        """Add a batch that a script takes, and whether a model is in training mode."""
        self.is_iterated = True
        taken = TakenBatch(iteration, rows, next(self._numbers), in_training, batch)
        iteration.add(taken)
        # What an earlier epoch of the same loader has left over will not be trained on.
        self._iterations = [
            other
            for other in self._iterations
            if other.waiting and not (other.is_over and other.sampler is iteration.sampler)
            if other is not iteration
        ]
        self._iterations.append(iteration)
        if len(self._owners) > self._max_owners:  # a script may keep tensors of many batches
            self._owners = {ref: owner for ref, owner in self._owners.items() if not ref.expired()}
            self._max_owners = 2 * len(self._owners) + _MIN_OWNERS
        for ref in _memory_of(batch):
            owner = self._owners.get(ref, taken)
            is_shared = owner is None or (owner is not taken and owner.iteration is iteration)
            self._owners[ref] = None if is_shared else taken

    def add_unplanned_loader(self, in_training: bool, is_stream: bool) -> None:
        """Add an iteration of a loader without a plan; `is_stream`: its data has no length."""
        self.is_iterated = True
        self.reads_stream |= is_stream
        if in_training:
            self._unplanned = next(self._numbers)

    def train(self, inputs: Any, in_order: bool = False) -> TakenBatch | None:
        """Return the batch of a forward with gradients; None if its loader has no plan.

        Args:
            inputs: of the forward.
            in_order: whether the script trains on its batches in the order in which it takes them.

        Raises:
            UserError: it cannot be identified, or it may have batches of two loaders.
        """
        waiting = [iteration for iteration in self._iterations if iteration.waiting]
        if sum(i.waiting[-1].in_training and not i.is_over for i in waiting) > 1:
            raise AgreedError(
                "--adaptive divides the batches of one loader at a time, and this step has batches "
                "of two, as zip(one, other) gives them; leave out --adaptive"
            )
        taken = self._by_memory(inputs)
        if taken is None:
            taken = self._by_order(inputs, in_order)
            if taken is None or taken.number < self._unplanned:
                return None
        if taken.iteration.thread != threading.get_ident():
            raise AgreedError(
                "--adaptive does not work with batches that another thread takes ahead, as a new "
                "plan would begin at other batches on each rank; iterate over the loader in the "
                "thread that trains"
            )
        taken.iteration.use(taken)
        self._latest = taken
        return taken

    def evaluate(self, inputs: Any) -> TakenBatch | None:
        """Return the batch of a forward without gradients; None if unknown."""
        taken = self._by_memory(inputs)
        last = next(reversed(self._waiting()), None)
        if taken is None and last is not None and last.waiting[-1].number > self._unplanned:
            taken = last.guess(inputs, [])
        again = self._evaluated
        if taken is None and last is None and again is not None and not again.iteration.is_over:
            return again
        if taken is None:
            self._unplanned = 0  # it is a loader of an evaluation
            return None
        taken.iteration.use(taken)
        self._evaluated = taken
        return taken

    def _waiting(self) -> list[Iteration]:
        """Return the iterations that a forward which shares no batch's memory may belong to.

        While one goes on, the remaining batches of an earlier one do not count.
        """
        used = [taken for taken in (self._latest, self._evaluated) if taken is not None]
        since = max((taken.number for taken in used if not taken.iteration.is_over), default=0)
        return [
            iteration
            for iteration in self._iterations
            if iteration.waiting and (not iteration.is_over or iteration.waiting[-1].number > since)
        ]

    def _by_memory(self, inputs: Any) -> TakenBatch | None:
        """Return the batch whose memory a forward's tensors share."""
        owners = {self._owners.get(ref) for ref in _memory_of(inputs)} - {None}
        if len({owner.rows for owner in owners if owner is not None}) > 1:
            raise UserError(
                "--adaptive cannot weight a forward whose tensors are of two batches; train on "
                "each batch as the loader gives it"
            )
        return max(owners, key=lambda owner: owner.number if owner else 0, default=None)

    def _by_order(self, inputs: Any, in_order: bool) -> TakenBatch | None:
        """Return the batch of a forward whose tensors share no batch's memory."""
        waiting = self._waiting()
        others = [taken for taken in (self._latest, self._evaluated) if taken is not None]
        if not waiting:  # another forward of the same batch; an evaluation is over
            continuing = [taken for taken in others if not taken.iteration.is_over]
            return max(continuing, key=lambda taken: taken.number, default=self._latest)
        iteration = max(waiting, key=lambda i: (not i.is_over, i.waiting[-1].in_training))
        if in_order and not iteration.is_direct:
            return iteration.waiting[0]
        taken = iteration.guess(inputs, others)
        if taken is None:
            raise UserError(
                f"--adaptive cannot tell which of the last {len(iteration.waiting)} batches the "
                "model is trained on; pass it the loader's tensors or copies of them, or train on "
                "each batch before taking the next one"
            )
        return taken


def tensors_in(value: Any, depth: int = _MAX_DEPTH) -> Iterator[torch.Tensor]:
    """Return the dense tensors of a batch, or of a forward's inputs."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_nested:
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part, depth)
    elif depth and not isinstance(value, torch.nn.Module):
        for part in getattr(value, "__dict__", {}).values():  # such as a graph's
            yield from tensors_in(part, depth - 1)


def _sample(tensor: torch.Tensor) -> tuple[torch.Size, torch.Tensor]:
    """Return a tensor's shape and a few of its elements, by which its copies are recognized."""
    count = min(tensor.numel(), _SAMPLED)
    places = torch.arange(count) * tensor.numel() // max(count, 1)
    try:
        return tensor.shape, tensor.detach().take(places.to(tensor.device)).cpu()
    except RuntimeError:  # not for this type of numbers
        return tensor.shape, torch.empty(0)


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())  # NaNs, too


def _memory_of(value: Any) -> Iterator[StorageWeakRef]:
    for tensor in tensors_in(value):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            yield StorageWeakRef(storage)
