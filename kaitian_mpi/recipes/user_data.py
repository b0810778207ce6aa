"""Data from a user's factory, for `--dataset module:factory`."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset

from kaitian_mpi.config.factory import load_factory, one_line, parameters_of
from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.class_count import known_classes
from kaitian_mpi.recipes.data_source import DataSource
from kaitian_mpi.recipes.images import shuffled_split
from kaitian_mpi.train.data.batches import Batches, same_shapes

_OR_A_TASK = "or give a Task with a loss of your own (--task)"


def load_user_data(spec: str, data_dir: str, val_split: float) -> DataSource:
    """Load training data, validation data and the number of classes from a user's factory.

    It is called without arguments, or with `data_dir=` if it takes that and one is given, and
    returns `(train, validation)` or one map-style dataset, of which `val_split` is held out by a
    fixed permutation. Each dataset yields (input tensor, int class) pairs. If a dataset does not
    say how many classes it has, its labels have to be read: `to_count`.
    """
    result = _call(spec, data_dir)
    parts = result if isinstance(result, tuple) else (result,)
    if len(parts) not in (1, 2):
        raise _wrong(spec, f"it returned a tuple of {len(parts)}")
    for dataset in parts:
        _check(spec, dataset)
    classes = [known_classes(spec, dataset) for dataset in parts]
    to_count = tuple(part for part, count in zip(parts, classes, strict=True) if not count)
    if len(parts) == 1:
        split = shuffled_split(len(parts[0]), val_split)
        parts = tuple(Subset(parts[0], indices.tolist()) for indices in split)
    train, validation = map(batches_of_pairs, parts)
    return DataSource(train, validation, max(classes), to_count)


def batches_of_pairs(dataset: Any) -> Batches:
    """Wrap a map-style dataset of (input tensor, int class) pairs.

    A batch is [n, *shape of an input], of the input's dtype, and int64 [n].
    """
    return Batches(dataset, _collate)


def _collate(pairs: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = zip(*pairs, strict=True)
    with same_shapes(f"resize or pad them in the dataset, {_OR_A_TASK} and a collate function"):
        stacked = torch.stack(inputs)
    return stacked, torch.tensor([operator.index(label) for label in labels])


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
    few = sorted({0, min(1, len(dataset) - 1), len(dataset) // 2})
    samples = [_read(spec, dataset, index) for index in few]
    sample = samples[0]
    if problem := _problem(sample):
        raise UserError(f"--dataset {spec}: {problem}, {_OR_A_TASK}")
    if not _is_pair(sample):
        raise _wrong(spec, f"its first sample is no such pair: {str(sample)[:80]!a}")
    if all(map(_is_pair, samples)):
        _collate(samples)  # their shapes are equal


def _read(spec: str, dataset: Any, index: int) -> Any:
    try:
        return dataset[index]
    except Exception as error:
        raise UserError(
            f"--dataset {spec}: reading sample {index} raised {one_line(error)}"
        ) from error


def _is_pair(sample: Any) -> bool:
    try:
        inputs, label = sample
        operator.index(label)
    except (TypeError, ValueError):
        return False
    return isinstance(inputs, torch.Tensor) and getattr(label, "ndim", 0) == 0


def _problem(sample: Any) -> str:
    """Return what a sample of a usual kind is instead of a pair, and what to return; or ""."""
    if isinstance(sample, Mapping):
        keys = ", ".join(map(repr, sample))
        return f"its samples have keys ({keys}); return (input tensor, int class) pairs of them"
    if not (isinstance(sample, tuple | list) and len(sample) == 2):
        return ""
    inputs, target = sample
    if not isinstance(inputs, torch.Tensor):
        kind = f"{type(inputs).__module__}.{type(inputs).__name__}".removeprefix("builtins.")
        return f"its inputs are of type {kind}; convert them to tensors of one shape"
    try:
        values = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError):
        return f"its targets are of type {type(target).__name__}; return the class as an int"
    ones = int((values == 1).sum())
    if values.ndim == 1 and len(values) > 1 and ones == 1 == values.count_nonzero():
        return "its targets are one-hot; return the class, such as int(target.argmax())"
    if values.is_floating_point():
        return (
            "its targets are floating-point numbers, as for regression, and it takes classes; "
            "return the class as an int"
        )
    shape = f"tensors of shape {[*values.shape]}"
    return f"its targets are {shape}; return one class for each sample" if values.ndim else ""


def _wrong(spec: str, problem: str) -> UserError:
    return UserError(
        f"--dataset {spec}: {problem}; the factory must return (train, validation) or one "
        f"map-style dataset, of (input tensor, int class) pairs, {_OR_A_TASK}"
    )
