"""Builds argument parsers from the fields of `TrainConfig`."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from kaitian_mpi.config import TrainConfig, flag_name
from kaitian_mpi.errors import UserError

# The sections of --help, and their flags by the fields' names.
SECTIONS = {
    "model and data": "model dataset data_dir val_split augment workers",
    "batch sizes": "global_batch_size batch_policy batch_size balance benchmark_seconds "
    "benchmark_cache micro_batch_size keep_all",
    "devices and communication": "allreduce devices emulate_kinds emulate_slowdown",
    "optimization": "epochs max_steps lr momentum nesterov weight_decay label_smoothing schedule "
    "warmup precision memory_format max_bad_steps check_every",
    "checkpoints and failures": "resume checkpoint_every checkpoint_minutes keep_checkpoints "
    "spares step_timeout snapshots snapshot_every",
    "seed and output": "seed run_dir log_interval log_level",
}


class OneLineParser(argparse.ArgumentParser):
    """An argparse parser that raises `UserError` instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise the error as a `UserError`."""
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
    """Add the flags of some fields of `TrainConfig`, in sections.

    Args:
        parser: the parser to add them to.
        names: the fields.
        defaults: defaults that differ from the config's.
    """
    types = typing.get_type_hints(TrainConfig)
    fields = {field.name: field for field in dataclasses.fields(TrainConfig)}
    for section, of_section in SECTIONS.items():
        wanted = [fields[name] for name in of_section.split() if name in names]
        group = parser.add_argument_group(section) if wanted else None
        for field in wanted:
            assert group is not None
            default = defaults.get(field.name, field.default)
            _add_flag(group, field, types[field.name], default)


def config_of(chosen: argparse.Namespace, names: Collection[str]) -> TrainConfig:
    """Return the config given by these flags; other fields keep their defaults.

    Raises:
        UserError: a value is invalid.
    """
    return TrainConfig(**{name: getattr(chosen, name) for name in names})


def parse_config(program: str, arguments: Sequence[str]) -> TrainConfig:
    """Parse command-line arguments into a config.

    Raises:
        UserError: an argument is unknown or invalid.
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
