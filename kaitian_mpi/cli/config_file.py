"""Reads flags of `kaitian-train` from a TOML file."""

from __future__ import annotations

import dataclasses
import difflib
import json
from typing import Any

from kaitian_mpi.config import TrainConfig, wrong_type
from kaitian_mpi.errors import UserError
from kaitian_mpi.supervise.environments import read_toml


def read_config_file(path: str) -> dict[str, Any]:
    """Return the settings in a file of `--config`, by the fields' names.

    A key is a flag's name without `--`, with `-` or `_` between its words; `set` is a table.

    Raises:
        UserError: the file cannot be read, is not TOML, or has an unknown key or a wrong value.
    """
    content = read_toml("--config", path)
    fields = {field.name: field for field in dataclasses.fields(TrainConfig)}
    del fields["config"]
    settings: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean {close[0].replace('_', '-')}?" if close else ""
            raise UserError(
                f"--config {path}: there is no setting {key!r}{hint}; write a flag of "
                "kaitian-train without its --"
            )
        if name in settings:
            raise UserError(f"--config {path}: {key} is set twice; keep one of them")
        if needed := wrong_type(fields[name], value):
            raise UserError(f"--config {path}: {key} must be {needed}, not {value!r}")
        settings[name] = value
    _check_table(path, settings.get("set", {}))
    return settings


def _check_table(path: str, table: dict[str, Any]) -> None:
    for key, value in table.items():
        if not key.isidentifier():
            raise UserError(f"--config {path}: set: {key!r} cannot be the name of an argument")
        try:
            json.dumps(value)
        except TypeError as error:
            raise UserError(
                f"--config {path}: set: {key} is a date or time, which a run's config.json cannot "
                "hold; put it in quotes"
            ) from error
