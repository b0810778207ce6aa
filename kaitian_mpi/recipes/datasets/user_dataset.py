"""Datasets from a user's factory, given as `--dataset module:factory`."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset

from kaitian_mpi.config.factory import load_factory, one_line, parameters_of
from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.datasets.arrays import shuffled_split
from kaitian_mpi.train.data.batches import Batches


def batches_of_pairs(dataset: Any) -> Batches:
    """Wrap a map-style dataset of (input tensor, int class) pairs.

    Indexed by a list of n sample indices, it returns the batch: [n, *shape of an input], of the
    input's dtype, and int64 [n].
    """
    return Batches(dataset, _collate)


def _collate(pairs: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    # Not torch's default_collate, which in a worker allocates memory in /dev/shm.
    inputs = torch.stack([inputs for inputs, _ in pairs])
    return inputs, torch.tensor([operator.index(label) for _, label in pairs])


def load_user_data(spec: str, data_dir: str, val_split: float) -> tuple[Batches, Batches, int]:
    """Load training data, validation data and the number of classes from a user's factory.

    It is called without arguments, or with `data_dir=` if it takes that and one is given, and
    returns `(train, validation)` or one map-style dataset, of which `val_split` is held out by a
    fixed permutation. Each dataset yields (input tensor, int class) pairs. The number of classes is
    its `num_classes`, the length of its `classes`, or 1 + the largest of its `targets`, `labels`,
    or classes read one by one.

    Raises:
        UserError: the factory cannot be imported, raises, or returns something else.
    """
    result = _call(spec, data_dir)
    parts = result if isinstance(result, tuple) else (result,)
    if len(parts) not in (1, 2):
        raise _wrong(spec, f"it returned a tuple of {len(parts)}")
    for dataset in parts:
        _check(spec, dataset)
    classes = max(_count_classes(spec, dataset) for dataset in parts)
    if len(parts) == 1:
        split = shuffled_split(len(parts[0]), val_split)
        parts = tuple(Subset(parts[0], indices.tolist()) for indices in split)
    return batches_of_pairs(parts[0]), batches_of_pairs(parts[1]), classes


def _call(spec: str, data_dir: str) -> Any:
    factory = load_factory("--dataset", spec)
    parameter = (parameters_of(factory) or {}).get("data_dir")
    if parameter is not None and parameter.default is parameter.empty and not data_dir:
        raise UserError(f"--dataset {spec}: the factory requires data_dir; give --data-dir")
    try:
        return factory(data_dir=data_dir) if parameter is not None and data_dir else factory()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--dataset {spec}: the factory raised {one_line(error)}") from error


def _check(spec: str, dataset: Any) -> None:
    mapped = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not mapped or isinstance(dataset, (IterableDataset, dict, str, torch.Tensor)):
        raise _wrong(spec, f"it returned a {type(dataset).__name__}")
    if len(dataset) == 0:
        raise UserError(f"--dataset {spec}: the dataset has no samples; return at least 1")
    try:
        sample = dataset[0]
    except Exception as error:
        raise UserError(
            f"--dataset {spec}: reading its first sample raised {one_line(error)}"
        ) from error
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        raise _wrong(spec, f"the first sample is a {type(sample).__name__}")
    if not isinstance(sample[0], torch.Tensor):
        raise _wrong(spec, f"the first input is a {type(sample[0]).__name__}")
    if not _is_class(sample[1]):
        raise _wrong(spec, f"the first class is {sample[1]!r}")


def _is_class(label: Any) -> bool:
    try:
        operator.index(label)
    except (TypeError, ValueError):
        return False
    # An integer array of one element has an index too, but would not collate to [n].
    return getattr(label, "ndim", 0) == 0


def _wrong(spec: str, problem: str) -> UserError:
    return UserError(
        f"--dataset {spec}: {problem}; the factory must return (train, validation) or one "
        "map-style dataset, of (input tensor, int class) pairs"
    )


def _count_classes(spec: str, dataset: Any) -> int:
    try:
        if hasattr(dataset, "num_classes"):
            return int(dataset.num_classes)
        if hasattr(dataset, "classes"):
            return len(dataset.classes)
        labels = getattr(dataset, "targets", getattr(dataset, "labels", None))
        if labels is None:
            labels = [int(dataset[index][1]) for index in range(len(dataset))]
        return 1 + int(torch.as_tensor(labels).max())
    except Exception as error:
        raise UserError(
            f"--dataset {spec}: counting its classes raised {one_line(error)}; give "
            "the dataset an attribute num_classes"
        ) from error
