"""Builds argument parsers from the fields of `TrainConfig`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tomllib
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from kaitian_mpi.cli.config_file import read_config_file
from kaitian_mpi.config import TrainConfig, flag_name
from kaitian_mpi.errors import UserError

# The sections of --help, and their flags by the fields' names.
SECTIONS = {
    "what to train": "config task set init workers",
    "image classification (not with --task)": "model dataset data_dir val_split augment "
    "optimizer lr momentum nesterov weight_decay clip_norm label_smoothing schedule warmup",
    "batch sizes": "global_batch_size batch_policy batch_size balance benchmark_seconds "
    "benchmark_cache micro_batch_size keep_all",
    "devices and communication": "allreduce network_allreduce wire relay_dtype relay_memory_mb "
    "devices device_map share_device group_by network_interface emulate_kinds emulate_slowdown "
    "parity",
    "optimization": "epochs max_steps precision memory_format sync_bn max_bad_steps check_every",
    "checkpoints and failures": "resume checkpoint_every checkpoint_minutes checkpoint_copy_mb "
    "keep_checkpoints spares step_timeout snapshots snapshot_every",
    "seed and output": "seed run_dir export log_interval progress quiet log_level",
    "metrics in other programs": "tensorboard wandb mlflow",
    "timeline and profile": "timeline timeline_every profile",
}
RECIPE = frozenset(SECTIONS["image classification (not with --task)"].split())
_ADAMW_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
_TASK_DEFAULTS: dict[str, Any] = {
    "memory_format": "contiguous"
}  # code such as x.view() may rely on it


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
    parser = make_parser(program)
    defaults = vars(parser.parse_args([]))
    # argparse sets a default only where the namespace has no value yet.
    unset = argparse.Namespace(**dict.fromkeys(defaults))
    chosen = vars(parser.parse_args(arguments, unset))
    given = {name: value for name, value in chosen.items() if value is not None}
    in_file = read_config_file(given["config"]) if given.get("config") else {}
    settings = {**in_file, **given}
    if "set" in settings:
        settings["set"] = {**in_file.get("set", {}), **given.get("set", {})}
    _check_one_task(settings)
    _check_optimizer(settings)
    own_defaults = _TASK_DEFAULTS if settings.get("task") else {}
    own_defaults |= _ADAMW_DEFAULTS if settings.get("optimizer") == "adamw" else {}
    return TrainConfig(**{**own_defaults, **settings})


def _check_one_task(given: Mapping[str, Any]) -> None:
    """Check that the flags given are those of one form: a task or a model."""
    if given.get("task"):
        if clash := [flag_name(name) for name in given if name in RECIPE]:
            raise UserError(
                f"found --task and {', '.join(clash)}, needed only one of them: what --model has "
                "flags for, a task has in its own code, with --set for its parameters"
            )
    elif "set" in given:
        raise UserError(
            "found --set without --task, needed --task module:function, whose parameter it sets"
        )


def _check_optimizer(given: Mapping[str, Any]) -> None:
    of_sgd = [flag_name(name) for name in ("momentum", "nesterov") if name in given]
    if given.get("optimizer") == "adamw" and of_sgd:
        raise UserError(
            f"found --optimizer adamw and {', '.join(of_sgd)}, needed only one of them: AdamW has "
            "none"
        )


class _AddSetting(argparse.Action):
    """Adds a `key=value` to a table."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add what a flag was given."""
        key, equals, text = str(values).partition("=")
        if not equals or not key.isidentifier():
            raise UserError(
                f"{option_string}: found {values!r}, needed key=value, such as "
                f"{option_string} lr=3e-4"
            )
        table = getattr(namespace, self.dest) or {}
        setattr(namespace, self.dest, {**table, key: read_value(f"{option_string} {key}", text)})


def read_value(name: str, text: str) -> Any:
    """Return a TOML value, or the text itself where it is none.

    Args:
        name: of the value, for the error.
        text: such as `3`, `1e-4`, `true`, `[1, 2]`, `"3"` or `adam`.

    Raises:
        UserError: it is a constant of Python's that would be taken for a string.
    """
    if text in ("True", "False", "None"):  # as a string, each of them would be true
        raise UserError(
            f"{name}={text}: found a constant of Python's, needed TOML: true or false; or "
            f"'\"{text}\"' for the string"
        )
    try:
        read = tomllib.loads(f"value = {text}")
        json.dumps(read)  # config.json cannot hold dates
    except (tomllib.TOMLDecodeError, RecursionError, TypeError):
        return text
    return read["value"] if len(read) == 1 else text


def _add_flag(
    group: argparse._ArgumentGroup, field: dataclasses.Field[Any], kind: type, default: object
) -> None:
    shown = f" (default {'on' if default is True else default})" if default not in ("", 0) else ""
    if default is dataclasses.MISSING:
        group.add_argument(
            flag_name(field.name),
            action=_AddSetting,
            default={},
            help=field.metadata["help"],
            metavar=field.metadata["metavar"],
        )
        return
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
