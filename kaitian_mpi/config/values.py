"""Settings: their help texts, permitted values and flags."""

from __future__ import annotations

import dataclasses
from typing import Any

from kaitian_mpi.errors import UserError

ABOVE_ZERO = 5e-324  # the smallest float above 0
BELOW_ONE = 1 - 2**-53  # the largest one below 1
_MOST = 10**9  # larger values would overflow later
LOG_LEVELS = ("debug", "info", "warning", "error")

PATHS = ("config", "data_dir", "benchmark_cache", "init", "resume", "run_dir", "export")
"""The fields that name a file or folder."""
MAY_DIFFER = frozenset(
    (
        *("config", "devices", "share_device", "vendor_library", "network_interface"),
        *("data_dir", "workers", "micro_batch_size", "memory_format", "relay_memory_mb"),
        *("progress", "quiet", "log_level", "tensorboard", "wandb", "mlflow"),
    )
)
"""The fields that may differ between ranks: a host's devices, folders, memory and workers, and what
is shown. All others are compared before a job does anything."""


def setting(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    metavar: str = "",
    least: float = 0,
    most: float = _MOST,
) -> Any:
    """Return a field of a settings dataclass; its number is from `least` to `most`."""
    about = {"help": help, "choices": choices, "metavar": metavar, "limits": (least, most)}
    return dataclasses.field(default=default, metadata=about)


def flag_name(field_name: str) -> str:
    """Return a field's command-line flag: `--max-steps` for `max_steps`."""
    return "--" + field_name.replace("_", "-")


def wrong_type(field: dataclasses.Field[Any], value: object) -> str:
    """Return the required kind of a field's value, such as `a number`; empty if it fits."""
    kind = dict if field.default is dataclasses.MISSING else type(field.default)
    # A whole number may stand for a float.
    if type(value) is kind or (kind is float and type(value) is int):
        return ""
    names = {int: "a whole number", float: "a number", bool: "true or false", dict: "a table"}
    return names.get(kind, "a string")


def outside(field: dataclasses.Field[Any], value: Any) -> str:
    """Return within what a field's number must be; empty if it is."""
    if type(field.default) not in (int, float):
        return ""
    least, most = field.metadata["limits"]
    if least <= value <= most:  # false for NaN
        return ""
    low = "above 0" if least == ABOVE_ZERO else f"at least {least:g}"
    high = "below 1" if most == BELOW_ONE else f"at most {most:g}".replace("e+0", "e")
    kind = "a whole number" if isinstance(field.default, int) else "a number"
    return f"{kind}, {low} and {high}"


def out_of_range(name: str, given: object, allowed: str, advice: str = "") -> UserError:
    """Return the error for a field with a value that it must not have."""
    hint = f"; {advice}" if advice else ""
    return UserError(f"{flag_name(name)} must be {allowed}, not {given!r}{hint}")
