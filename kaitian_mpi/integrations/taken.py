"""Which of the batches that a script has taken from its loaders a forward of its model has.

A forward's tensors tell if they are in the memory of a batch, or have the content of one, as after
a copy to a device. Others, such as augmented ones, have the batch that the script has taken last,
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


class Given(NamedTuple):
    """How many rows of a batch the ranks were given."""

    own: int
    """This rank's; 0 if it was given a row only so that it has a batch: the row counts nothing."""
    all_ranks: int
    is_padded: bool = False
    """Whether the ranks may have the same rows, as in a partial batch of torch's samplers."""


class Iteration:
    """An iteration of a script over a loader, in the thread that begins it."""

    def __init__(self, cut: Any) -> None:
        self.cut = cut
        """Of batches.py: cuts the loader's batches."""
        self.thread = threading.get_ident()
        self.waiting: list[Taken] = []
        """The batches that no forward has had, in the order in which they were taken."""
        self.is_direct: bool | None = None
        """Whether a forward has the batch that was taken last; None before the first forward."""
        self.is_over = False
        """Whether the script takes no more batches."""

    def close(self) -> None:
        """Take note that the script takes no more batches."""
        self.is_over = True

    def add(self, taken: Taken) -> None:
        """Add a batch that the script has taken."""
        self.waiting.append(taken)
        del self.waiting[:-_MAX_WAITING]

    def use(self, taken: Taken) -> None:
        """Take note that a forward has a batch, maybe not as the first one."""
        if taken not in self.waiting:
            return
        self.is_direct = self.is_direct is not False and taken is self.waiting[-1]
        if self.is_direct:
            self.waiting.clear()  # those before it were skipped
        else:
            self.waiting.remove(taken)

    def guess(self, inputs: Any, others: list[Taken]) -> Taken | None:
        """Return the batch that a forward has whose tensors are in no batch's memory, if known.

        Args:
            inputs: what the forward is given.
            others: batches that are not waiting, and which the forward may have as well.
        """
        if self.is_direct or (self.is_direct is None and len(self.waiting) == 1):
            return self.waiting[-1]
        candidates = [*self.waiting, *(taken for taken in others if taken.iteration is self)]
        # Tensors that are alike in several batches, such as masks, do not tell.
        told: set[Taken] = set()
        for tensor in tensors_in(inputs):
            alike = [taken for taken in candidates if taken.has(tensor)]
            told.update(alike if len(alike) == 1 else ())
        return told.pop() if len(told) == 1 else None


class Taken:
    """A batch that a script has taken."""

    def __init__(
        self, iteration: Iteration, given: Given, number: int, in_training: bool, batch: Any
    ) -> None:
        self.iteration = iteration
        self.given = given
        self.number = number
        """How many batches were taken before, from any loader."""
        self.in_training = in_training
        """Whether a model was in training mode then."""
        # A forward's tensors are compared with these, if it may have one of several batches.
        compares = in_training and not iteration.is_direct
        self._samples = [_sample(tensor) for tensor in tensors_in(batch)] if compares else []

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of the batch has the content of `tensor`, as far as sampled."""
        shape, values = _sample(tensor)
        return bool(values.numel()) and any(
            shape == batch_shape and _are_same(batch_values.to(values.dtype), values)
            for batch_shape, batch_values in self._samples
        )


class TakenBatches:
    """The batches that a script has taken."""

    def __init__(self) -> None:
        self._iterations: list[Iteration] = []  # by the batches that were taken last
        # By their memory; None if several batches of an iteration have it.
        self._owners: dict[StorageWeakRef, Taken | None] = {}
        self._max_owners = _MIN_OWNERS  # before those whose memory is free are left out
        self._numbers = itertools.count(1)
        self._uncut = 0  # the number at which a loader that is not cut was iterated in training
        self._latest: Taken | None = None  # that a forward has had with gradients
        self._evaluated: Taken | None = None  # that a forward has had without
        self.is_iterated = False
        """Whether the script has iterated over a loader."""
        self.reads_stream = False
        """Whether one of them read an `IterableDataset`."""

    def take(self, iteration: Iteration, given: Given, batch: Any, in_training: bool) -> None:
        """Take note that a script takes a batch, and whether a model is in training mode."""
        self.is_iterated = True
        taken = Taken(iteration, given, next(self._numbers), in_training, batch)
        iteration.add(taken)
        # What an earlier epoch of the same loader has left over will not be trained on.
        self._iterations = [
            other
            for other in self._iterations
            if other.waiting and not (other.is_over and other.cut is iteration.cut)
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

    def take_uncut(self, in_training: bool, is_stream: bool) -> None:
        """Take note that a loader is iterated that is not cut, and if its data has no length."""
        self.is_iterated = True
        self.reads_stream |= is_stream
        if in_training:
            self._uncut = next(self._numbers)

    def train(self, inputs: Any, in_order: bool = False) -> Taken | None:
        """Return the batch that a forward with gradients has; None if it is of an uncut loader.

        Args:
            inputs: what the forward is given.
            in_order: whether the script trains on its batches in the order in which it takes them.

        Raises:
            UserError: it cannot be told, or there may be batches of two loaders.
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
            if taken is None or taken.number < self._uncut:
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

    def evaluate(self, inputs: Any) -> Taken | None:
        """Return the batch that a forward without gradients has, if known."""
        taken = self._by_memory(inputs)
        last = next(reversed(self._waiting()), None)
        if taken is None and last is not None and last.waiting[-1].number > self._uncut:
            taken = last.guess(inputs, [])
        again = self._evaluated
        if taken is None and last is None and again is not None and not again.iteration.is_over:
            return again
        if taken is None:
            self._uncut = 0  # it is a loader of an evaluation
            return None
        taken.iteration.use(taken)
        self._evaluated = taken
        return taken

    def _waiting(self) -> list[Iteration]:
        """Return the iterations whose batches a forward may have that is not told by its memory.

        While one goes on, what an earlier one has left over does not count.
        """
        used = [taken for taken in (self._latest, self._evaluated) if taken is not None]
        since = max((taken.number for taken in used if not taken.iteration.is_over), default=0)
        return [
            iteration
            for iteration in self._iterations
            if iteration.waiting and (not iteration.is_over or iteration.waiting[-1].number > since)
        ]

    def _by_memory(self, inputs: Any) -> Taken | None:
        """Return the batch whose memory a forward's tensors are in."""
        owners = {self._owners.get(ref) for ref in _memory_of(inputs)} - {None}
        if len({owner.given for owner in owners if owner is not None}) > 1:
            raise UserError(
                "--adaptive cannot weight a forward whose tensors are of two batches; train on "
                "each batch as the loader gives it"
            )
        return max(owners, key=lambda owner: owner.number if owner else 0, default=None)

    def _by_order(self, inputs: Any, in_order: bool) -> Taken | None:
        """Return the batch that a forward has whose tensors are in no batch's memory."""
        waiting = self._waiting()
        others = [taken for taken in (self._latest, self._evaluated) if taken is not None]
        if not waiting:  # another forward of the same batch; an evaluation is over
            going_on = [taken for taken in others if not taken.iteration.is_over]
            return max(going_on, key=lambda taken: taken.number, default=self._latest)
        iteration = max(waiting, key=lambda i: (not i.is_over, i.waiting[-1].in_training))
        if in_order and not iteration.is_direct:
            return iteration.waiting[0]
        taken = iteration.guess(inputs, others)
        if taken is None:
            raise UserError(
                f"--adaptive cannot tell which of {len(iteration.waiting)} batches that were taken "
                "the model is trained on; give it the loader's tensors or copies of them, or train "
                "on each batch before the next one is taken"
            )
        return taken


def tensors_in(value: Any, depth: int = _MAX_DEPTH) -> Iterator[torch.Tensor]:
    """Return the dense tensors of a batch, or of what a forward is given."""
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
    """Return a tensor's shape, and a few of its elements, which its copies have as well."""
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
