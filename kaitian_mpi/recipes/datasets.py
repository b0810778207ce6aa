"""The datasets for `--dataset`: built in, in a folder, or from a user's factory."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.data_source import DataSource

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
        from kaitian_mpi.recipes.user_data import load_user_data

        return load_user_data(config.dataset, config.data_dir, config.val_split)
    automatic = "none"
    num_classes = 10
    if config.dataset == "imagefolder":
        from kaitian_mpi.recipes.image_folder import load_image_folder

        folder = load_image_folder(config.data_dir, config.image_size, config.val_split)
        arrays, validation, num_classes = folder
    else:
        module, function, automatic = _BUILT_IN[config.dataset]
        load = getattr(import_module(f"kaitian_mpi.recipes.{module}"), function)
        arrays, validation = load(config.val_split if module == "images" else config.data_dir)
    kind = automatic if config.augment == "auto" else config.augment
    train = replace(arrays, augment=kind, seed=config.seed)
    return DataSource(train, validation, num_classes)
