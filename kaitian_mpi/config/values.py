"""What a setting is: its help text, the values it may have, and its flag."""

from __future__ import annotations

import dataclasses
from typing import Any

from kaitian_mpi.errors import UserError

_MAX_COUNT = 10**9
_ABOVE_ZERO = 5e-324  # the smallest float above 0
RANGES: dict[str, tuple[float, float, str]] = {
    **dict.fromkeys(
        ("global_batch_size", "batch_size", "epochs", "keep_checkpoints", "snapshot_every"),
        (1, _MAX_COUNT, "a whole number from 1 to 1e9"),
    ),
    **dict.fromkeys(
        (
            *("max_steps", "micro_batch_size", "max_bad_steps", "check_every"),
            *("checkpoint_every", "spares", "timeline_every"),
        ),
        (0, _MAX_COUNT, "a whole number from 0 to 1e9"),
    ),
    "relay_memory_mb": (1, 1 << 20, "from 1 to 1048576 MB"),
    "checkpoint_copy_mb": (0, 1 << 30, "from 0 to 2^30 MB"),
    "workers": (0, 1024, "a whole number from 0 to 1024"),
    "seed": (0, 2**48 - 1, "a whole number from 0 to 2^48 - 1"),
    "lr": (_ABOVE_ZERO, 1e6, "a number above 0 and at most 1e6"),
    "weight_decay": (0, 1e6, "a number from 0 to 1e6"),
    "clip_norm": (0, 1e6, "a number from 0 to 1e6"),
    "benchmark_seconds": (_ABOVE_ZERO, 1e9, "above 0 and at most 1e9 seconds"),
    "log_interval": (0, 1e9, "from 0 to 1e9 seconds"),
    "checkpoint_minutes": (0, 1e9, "from 0 to 1e9 minutes"),
    "step_timeout": (0, 1e9, "from 0 to 1e9 seconds"),
}
"""Minimum, maximum and their text, by field: values outside would overflow later."""
LOG_LEVELS = ("debug", "info", "warning", "error")

PATHS = (
    *("config", "data_dir", "benchmark_cache", "init", "resume", "run_dir", "export"),
    "device_map",
)
"""The fields that name a file or folder."""
MAY_DIFFER = frozenset(
    (
        *("config", "devices", "device_map", "share_device", "network_interface", "data_dir"),
        *("workers", "micro_batch_size", "memory_format", "relay_memory_mb"),
        *("progress", "quiet", "log_level", "tensorboard", "wandb", "mlflow"),
    )
)
"""The fields that may differ between ranks: a host's devices, folders, memory and workers, and what
is shown. All others are compared before a job does anything."""


def setting(default: Any, help: str, choices: tuple[str, ...] = (), metavar: str = "") -> Any:
    """Return a field of a settings dataclass, with its help text and its choices, if any."""
    return dataclasses.field(
        default=default, metadata={"help": help, "choices": choices, "metavar": metavar}
    )


def flag_name(field_name: str) -> str:
    """Return a field's command-line flag: `--max-steps` for `max_steps`."""
    return "--" + field_name.replace("_", "-")


def wrong_type(field: dataclasses.Field[Any], value: object) -> str:
    """Return what a field's value must be, such as `a number`; empty if it is that."""
    kind = dict if field.default is dataclasses.MISSING else type(field.default)
    # A whole number may stand for a float.
    if type(value) is kind or (kind is float and type(value) is int):
        return ""
    names = {int: "a whole number", float: "a number", bool: "true or false", dict: "a table"}
    return names.get(kind, "a string")


def out_of_range(name: str, given: object, allowed: str, advice: str = "") -> UserError:
    """Return the error for a field with a value that it must not have."""
    hint = f"; {advice}" if advice else ""
    return UserError(f"{flag_name(name)} must be {allowed}, not {given!r}{hint}")
