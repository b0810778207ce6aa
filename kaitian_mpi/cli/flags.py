"""A parser made from the fields of a config."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from kaitian_mpi.config import TrainConfig, flag_name
from kaitian_mpi.errors import UserError

# The sections of --help, each from the field that it starts with.
_SECTIONS = {
    "model": "model and data",
    "global_batch_size": "batch sizes",
    "allreduce": "devices and communication",
    "epochs": "optimization",
    "resume": "checkpoints and failures",
    "seed": "seed and output",
}


class OneLineParser(argparse.ArgumentParser):
    """An argparse parser that raises `UserError` instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        """Raise the fault as a `UserError`."""
        raise UserError(f"{message}; see {self.prog} --help")


def make_parser(program: str) -> argparse.ArgumentParser:
    """Return the parser of `kaitian-train`: one flag for each field of `TrainConfig`."""
    parser = OneLineParser(
        prog=program,
        description="Train a PyTorch model on a mix of accelerators: start one process per "
        "device with mpirun.",
        epilog=f"example: mpirun -np 4 {program} --model mobilenetv2",
        allow_abbrev=False,
    )
    add_flags(parser, [field.name for field in dataclasses.fields(TrainConfig)])
    return parser


def add_flags(parser: argparse.ArgumentParser, names: Collection[str], **defaults: object) -> None:
    """Add the flags of some fields of `TrainConfig`, in its order and in sections.

    Args:
        parser: where to add them.
        names: the fields.
        defaults: defaults that differ from the config's.
    """
    types = typing.get_type_hints(TrainConfig)
    section, group = "", None
    for field in dataclasses.fields(TrainConfig):
        if field.name in _SECTIONS:
            section, group = _SECTIONS[field.name], None
        if field.name in names:
            group = group or parser.add_argument_group(section)
            default = defaults.get(field.name, field.default)
            _add_flag(group, field, types[field.name], default)


def config_of(chosen: argparse.Namespace, names: Collection[str]) -> TrainConfig:
    """Return the config that was chosen by these flags; the other fields keep their defaults.

    Raises:
        UserError: a value is wrong.
    """
    return TrainConfig(**{name: getattr(chosen, name) for name in names})


def parse_config(program: str, arguments: Sequence[str]) -> TrainConfig:
    """Turn command-line arguments into a config.

    Raises:
        UserError: an argument is unknown or wrong.
    """
    return TrainConfig(**vars(make_parser(program).parse_args(arguments)))


def _add_flag(
    group: argparse._ArgumentGroup, field: dataclasses.Field[Any], kind: type, default: object
) -> None:
    shown = f" (default {'on' if default is True else default})" if default not in ("", 0) else ""
    options: dict[str, Any] = {
        "default": default,
        "help": (field.metadata["help"] + shown).replace("%", "%%"),
    }
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["type"] = kind
        options["choices"] = field.metadata["choices"] or None
        default_metavar = {int: "N", float: "X", str: "NAME"}[kind]
        options["metavar"] = field.metadata["metavar"] or (
            None if field.metadata["choices"] else default_metavar
        )
    group.add_argument(flag_name(field.name), **options)
