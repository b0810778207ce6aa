"""The datasets for `--dataset`: built in, or from a user's factory."""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.config.factory import load_factory, one_line, parameters_of
from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.images import shuffled_split
from kaitian_mpi.train.data.batches import Batches, same_shapes

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSource:
    """The data of a run. A batch of n samples is inputs [n, ...] and labels int64 [n]."""

    train: Dataset
    """The training samples, augmented."""
    validation: Dataset
    """The validation samples, never augmented."""
    num_classes: int
    """The number of classes: all labels are below it."""


# By name: the module in this folder, its function, and the meaning of `--augment auto`. Only the
# module that is used is imported. All have ten classes.
_BUILT_IN = {
    "digits": ("images", "load_digits", "crop"),
    "cifar10": ("cifar_mnist", "load_cifar10", "crop-flip"),
    "mnist": ("cifar_mnist", "load_mnist", "crop"),
    "synthetic": ("images", "make_synthetic", "none"),
}


def load_data(config: TrainConfig) -> DataSource:
    """Load the dataset given by `config.dataset`. Every rank holds all of it."""
    if ":" in config.dataset:
        if config.augment not in ("auto", "none"):
            raise UserError(
                f"--augment {config.augment} works with built-in datasets only, not with --dataset "
                f"{config.dataset}; augment in the factory and give --augment none"
            )
        return load_user_data(config.dataset, config.data_dir, config.val_split)
    module, function, automatic = _BUILT_IN[config.dataset]
    load = getattr(import_module(f"kaitian_mpi.recipes.{module}"), function)
    arrays, validation = load(config.val_split if module == "images" else config.data_dir)
    kind = automatic if config.augment == "auto" else config.augment
    train = replace(arrays, augment=kind, seed=config.seed)
    return DataSource(train, validation, num_classes=10)


def load_user_data(spec: str, data_dir: str, val_split: float) -> DataSource:
    """Load training data, validation data and the number of classes from a user's factory.

    It is called without arguments, or with `data_dir=` if it takes that and one is given, and
    returns `(train, validation)` or one map-style dataset, of which `val_split` is held out by a
    fixed permutation. Each dataset yields (input tensor, int class) pairs. The number of classes is
    its `num_classes`, the length of its `classes`, or 1 + the largest of its `targets`, `labels`,
    or classes read one by one.
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
    return DataSource(batches_of_pairs(parts[0]), batches_of_pairs(parts[1]), classes)


def batches_of_pairs(dataset: Any) -> Batches:
    """Wrap a map-style dataset of (input tensor, int class) pairs.

    A batch is [n, *shape of an input], of the input's dtype, and int64 [n].
    """
    return Batches(dataset, _collate)


def _collate(pairs: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = zip(*pairs, strict=True)
    with same_shapes():
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
    try:
        sample = dataset[0]
        inputs, label = sample
        operator.index(label)
        is_pair = isinstance(inputs, torch.Tensor) and getattr(label, "ndim", 0) == 0
    except (TypeError, ValueError):
        is_pair = False
    except Exception as error:
        raise UserError(
            f"--dataset {spec}: reading its first sample raised {one_line(error)}"
        ) from error
    if not is_pair:
        raise _wrong(spec, f"its first sample is no such pair: {str(sample)[:80]!a}")


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
            _log.info(
                "counting the classes of the dataset by reading its %s samples; an attribute "
                "num_classes of the dataset saves that",
                f"{len(dataset):,}",
            )
            labels = [int(dataset[index][1]) for index in range(len(dataset))]
        return 1 + int(torch.as_tensor(labels).max())
    except Exception as error:
        raise UserError(
            f"--dataset {spec}: counting its classes raised {one_line(error)}; give "
            "the dataset an attribute num_classes"
        ) from error
