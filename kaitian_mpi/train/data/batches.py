"""Batches of any dataset, by the indices of their samples, and the batches of one step."""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from kaitian_mpi.balance.shares import split_micro_batches
from kaitian_mpi.errors import UserError


class Stream:
    """The samples of a stream of known length, by position.

    Reading on is cheap; a position before the last one begins the stream again. Each rank reads all
    of it, and keeps its own samples.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self._left: Iterator[Any] | None = None
        self._position = 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        """Return the sample at a position, after reading those before it."""
        if self._left is None or index < self._position:
            self._left = iter(self.data)
            self._position = 0
        try:
            while self._position < index:
                next(self._left)
                self._position += 1
            sample = next(self._left)
        except StopIteration:
            raise UserError(
                f"Task: the data ended after {self._position} samples, and its length is "
                f"{len(self)}; let __len__ return what __iter__ yields"
            ) from None
        self._position += 1
        return sample

    def set_epoch(self, epoch: int) -> None:
        """Begin the stream of an epoch."""
        self._left = None
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state by which another process reads it from its beginning."""
        return {**vars(self), "_left": None}


def is_stream(data: Any) -> bool:
    """Return whether a dataset can only be iterated over."""
    return isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")


class Batches(Dataset[Any]):
    """Wraps a dataset; indexed by a list of sample indices, it returns a batch."""

    gives_batches = True

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self.data = Stream(data) if is_stream(data) else data
        self.collate = collate or _collate

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, indices: list[int]) -> Any:
        """Return the batch of these samples, at least one."""
        return self.collate(self.samples(indices))

    def samples(self, indices: list[int]) -> list[Any]:
        if not hasattr(self.data, "__getitems__"):
            return [self.data[index] for index in indices]
        samples = list(self.data.__getitems__(indices))
        if len(samples) != len(indices):
            raise UserError(
                f"__getitems__ of {type(self.data).__name__} returned {len(samples)} samples for "
                f"{len(indices)} indices; return one for each"
            )
        return samples


def _collate(samples: list[Any]) -> Any:
    with same_shapes("resize or pad them in the dataset, or give a Task a collate function"):
        return default_collate(samples)


@contextmanager
def same_shapes(advice: str) -> Iterator[None]:
    """Stack the samples of a batch in the block; raise a `UserError` if their shapes differ."""
    try:
        yield
    except RuntimeError as error:
        if "each tensor to be equal size" not in str(error):
            raise
        shapes = " and ".join(re.findall(r"\[[\d, ]*\]", str(error)))
        raise UserError(
            f"the samples of a batch have different shapes, {shapes}: {advice}"
        ) from error


def as_batches(data: Any, collate: Callable[[list[Any]], Any] | None = None) -> Any:
    """Return a dataset that returns a batch when indexed by a list of sample indices.

    A dataset whose attribute `gives_batches` is true is returned unchanged.
    """
    return data if getattr(data, "gives_batches", False) else Batches(data, collate)


class MicroBatch(NamedTuple):
    """Samples that a rank computes at once."""

    samples: int
    """0 for a batch that stands in for a rank's empty share."""
    batch: Any


class Share(NamedTuple):
    """The samples that a rank loads for a step."""

    epoch: int
    seed: int
    """Seeds the random numbers that a data-loading process draws for these samples."""
    micro_batches: list[tuple[int, list[int]]]
    """The number of samples of each micro-batch, and the indices to load for it."""


def split_share(
    indices: Sequence[int], micro_batch_size: int | None, min_batch: int, stand_in: int = 0
) -> list[tuple[int, list[int]]]:
    """Return the `micro_batches` of a `Share`.

    Without samples, one of 0 samples, with the indices from `stand_in` on.
    """
    if not indices:
        return [(0, list(range(stand_in, stand_in + min_batch)))]
    sizes = split_micro_batches(len(indices), micro_batch_size, min_batch)
    left = iter(indices)
    return [(size, list(itertools.islice(left, size))) for size in sizes]


class StepBatches(Dataset[list[MicroBatch]]):
    """Returns a rank's share of a step as micro-batches."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._epoch: int | None = None  # of the dataset in a data-loading process

    def __getitem__(self, share: Share) -> list[MicroBatch]:
        if get_worker_info() is not None:
            self._prepare_process(share)
        try:
            return [MicroBatch(size, self._batches[chosen]) for size, chosen in share.micro_batches]
        except StopIteration as error:  # torch's loader would take it for the end of the epoch
            raise RuntimeError("the dataset, or collate, raised StopIteration") from error

    def _prepare_process(self, share: Share) -> None:
        # So a share is the same in any process, and after a resume.
        random.seed(share.seed)
        np.random.seed(share.seed)
        torch.manual_seed(share.seed)
        if share.epoch != self._epoch:
            self._epoch = share.epoch
            set_epoch_of(self._batches, share.epoch)


def set_epoch_of(batches: Any, epoch: int) -> None:
    """Call the `set_epoch` of a dataset, or of the one that a `Batches` wraps, if it has one."""
    data = batches.data if isinstance(batches, Batches) else batches
    if (set_epoch := getattr(data, "set_epoch", None)) is not None:
        set_epoch(epoch)


def place(
    batch: Any, device: torch.device, memory_format: torch.memory_format = torch.contiguous_format
) -> Any:
    """Return a batch with its tensors on a device; all else stays as it is."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        placed = tensor.to(device, non_blocking=True)
        if placed.ndim == 4 and placed.is_floating_point():
            placed = placed.contiguous(memory_format=memory_format)
        return placed

    return map_tensors(batch, move, lambda value: value.to(device))


def map_tensors(
    batch: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    change_object: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Return a batch with every tensor in it changed; all else stays as it is."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if type(batch) in (str, bytes, int, float, bool, type(None)):
        return batch
    if callable(getattr(batch, "to", None)):  # first: some are tuples or mappings as well
        changed = change_object(batch)
        return batch if changed is None else changed
    inner = partial(map_tensors, change=change, change_object=change_object)
    if isinstance(batch, Mapping):
        values = {key: inner(value) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return values
        copied = copy.copy(batch)
        copied.update(values)
        return copied
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(inner, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(inner, batch))
    if is_dataclass(batch) and not isinstance(batch, type):
        changed = copy.copy(batch)
        for field in fields(batch):
            object.__setattr__(changed, field.name, inner(getattr(batch, field.name)))
        return changed
    return batch


def as_collated(share: list[MicroBatch]) -> list[MicroBatch]:
    """Return a share as it is: torch's default would convert numpy's arrays, or fail to."""
    return share
