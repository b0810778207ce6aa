"""The number of classes of a user's dataset: what the dataset says, or by reading its labels."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from kaitian_mpi.config.factory import one_line
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.reading import duration
from kaitian_mpi.recipes.data_source import DataSource
from kaitian_mpi.runtime.watchdog import enter_phase

_log = logging.getLogger(__name__)

_SEC_BETWEEN_LINES = 10.0


def known_classes(spec: str, dataset: Any) -> int:
    """Return the number of classes that a dataset states; 0 if it states none.

    That is its `num_classes`, the length of its `classes`, or 1 + the largest of its `targets` or
    `labels`; also of a dataset that it is a part of.
    """
    try:
        return _known(dataset)
    except Exception as error:
        raise _not_counted(spec, error) from error


def _known(dataset: Any) -> int:
    if hasattr(dataset, "num_classes"):
        return int(dataset.num_classes)
    if hasattr(dataset, "classes"):
        return len(dataset.classes)
    labels = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if labels is None and isinstance(dataset, TensorDataset):
        labels = dataset.tensors[1]
    if labels is not None:
        return 1 + int(torch.as_tensor(labels).max())
    if isinstance(dataset, Subset):
        return _known(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        counts = [_known(part) for part in dataset.datasets]
        return max(counts) if all(counts) else 0
    return 0


def count_classes(spec: str, source: DataSource, world: World) -> DataSource:
    """Return a source with the number of its classes; each rank reads a part of the labels.

    Collective.
    """
    lengths = [len(dataset) for dataset in source.to_count]
    longest = max(gather_values(world.comm, lengths))
    if not longest:
        return source
    if world.rank == 0:
        _log.info(
            "counting the classes of the dataset by reading its %s samples, each rank a part; an "
            "attribute num_classes, classes or targets of the dataset saves that",
            f"{sum(longest):,}",
        )
    with agree_on_errors(world.comm):
        enter_phase("counting the classes (--dataset)", limited=False)
        largest = max((_read(spec, data, world) for data in source.to_count), default=-1)
        enter_phase("waiting for the other ranks' classes", waits=True, limited=False)
    count = 1 + max(gather_values(world.comm, largest))
    return replace(source, num_classes=max(source.num_classes, count), to_count=())


def _read(spec: str, dataset: Sequence[Any], world: World) -> int:
    """Return the largest label of this rank's part of a dataset."""
    first, last = (len(dataset) * rank // world.size for rank in (world.rank, world.rank + 1))
    began = shown = time.monotonic()
    largest = -1
    for index in range(first, last):
        try:
            largest = max(largest, int(dataset[index][1]))
        except Exception as error:
            raise _not_counted(spec, error) from error
        now = time.monotonic()
        if world.rank == 0 and now - shown >= _SEC_BETWEEN_LINES:
            shown = now
            done = (index + 1 - first) / (last - first)
            left = duration((now - began) * (1 / done - 1))
            _log.info("counting the classes: %.0f%% read | %s left", 100 * done, left)
    return largest


def _not_counted(spec: str, error: Exception) -> UserError:
    return UserError(
        f"--dataset {spec}: counting its classes raised {one_line(error)}; give the dataset an "
        "attribute num_classes"
    )
