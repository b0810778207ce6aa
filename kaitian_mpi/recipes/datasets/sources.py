"""The datasets for `--dataset`: built in, or from a user's factory."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from torch.utils.data import Dataset

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.datasets.augment import Augmented


@dataclass(frozen=True)
class DataSource:
    """The training and validation data of a run.

    Both datasets are indexed by a list of n sample indices, which returns a batch: inputs
    [n, ...] and labels int64 [n].
    """

    name: str
    """The value of `--dataset`."""
    train: Dataset
    """Training data, augmented."""
    validation: Dataset
    """Validation data, never augmented."""
    num_classes: int
    """Labels are below this."""


# By name: the module here, its function, and what `--augment auto` means. Only the one that is used
# is imported. All have ten classes.
_BUILT_IN = {
    "digits": ("bundled", "load_digits", "crop"),
    "cifar10": ("cifar10", "load", "crop-flip"),
    "mnist": ("mnist", "load", "crop"),
    "synthetic": ("bundled", "make_synthetic", "none"),
}


def load_data(config: TrainConfig) -> DataSource:
    """Load the dataset given by `config.dataset`. Every rank holds all of it.

    Raises:
        UserError: there is no such dataset, its files are missing or wrong, or the user's factory
            fails.
    """
    if ":" in config.dataset:
        return _load_factory_source(config)
    if config.dataset not in _BUILT_IN:
        raise UserError(
            f"--dataset: there is no dataset {config.dataset!r}; give {', '.join(_BUILT_IN)} or "
            "module:factory"
        )
    module, function, automatic = _BUILT_IN[config.dataset]
    load = getattr(import_module(f"kaitian_mpi.recipes.datasets.{module}"), function)
    folder = () if module == "bundled" else (config.data_dir,)
    arrays, validation = load(*folder, config.val_split)
    kind = automatic if config.augment == "auto" else config.augment
    train = arrays if kind == "none" else Augmented(arrays, kind, config.seed)
    return DataSource(config.dataset, train, validation, num_classes=10)


def _load_factory_source(config: TrainConfig) -> DataSource:
    if config.augment not in ("auto", "none"):
        raise UserError(
            f"--augment {config.augment} works with built-in datasets only, not with --dataset "
            f"{config.dataset}; augment in the factory and give --augment none"
        )
    from kaitian_mpi.recipes.datasets.user_dataset import load_user_data

    train, validation, classes = load_user_data(config.dataset, config.data_dir, config.val_split)
    return DataSource(config.dataset, train, validation, classes)
