"""Reads JSON that may be damaged: a file that a crash has cut, or values of a wrong type."""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 64 << 20
MAX_LINE_BYTES = 8 << 20
MAX_NAME = 48
"""Characters of a host or a figure's name that are shown."""
MAX_TEXT = 400
# Control characters and lone surrogates, which XML forbids, and marks that reverse the text.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_MAX_WHOLE = 1 << 53


class DamagedError(Exception):
    """A file exists but cannot be read; the message is the reason."""


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; NaN and infinities in it are None.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedError: it cannot be read, or is not a JSON object.
    """
    try:
        _require_regular_file(path)
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(error.strerror or str(error)) from error
    if len(content) > MAX_FILE_BYTES:
        raise DamagedError(f"larger than {MAX_FILE_BYTES >> 20} MB")
    parsed = _parse(content)
    if not isinstance(parsed, dict):
        raise DamagedError("not a JSON object")
    return parsed


def read_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the object in each line of a JSON lines file; None for a line that is not one.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedError: it cannot be read.
    """
    try:
        _require_regular_file(path)
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                if not line.strip():
                    continue
                try:
                    parsed = _parse(line)
                except DamagedError:
                    parsed = None
                yield parsed if isinstance(parsed, dict) else None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(error.strerror or str(error)) from error


def _require_regular_file(path: Path) -> None:
    if not stat.S_ISREG(path.stat().st_mode):  # reading a FIFO would wait forever
        raise DamagedError("not a regular file")


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise DamagedError("not valid JSON") from error


def number(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if type(value) is int:  # not a bool
        return float(value) if -_MAX_WHOLE <= value <= _MAX_WHOLE else None
    return None


def whole(value: Any) -> int | None:
    """Return a whole number of 0 or more, or None for anything else."""
    found = number(value)
    return int(found) if found is not None and found >= 0 and found == int(found) else None


def numbers(value: Any, count: int | None = None) -> tuple[float, ...] | None:
    """Return a list of numbers, NaN for other entries; None if there are not `count` entries."""
    if not isinstance(value, list) or (count is not None and len(value) != count) or not value:
        return None
    if set(map(type, value)) == {float} and math.isfinite(sum(value)):  # as nearly always
        return tuple(value)
    found = [number(entry) for entry in value]
    if all(entry is None for entry in found):
        return None
    return tuple(math.nan if entry is None else entry for entry in found)


def wholes(value: Any) -> tuple[int, ...] | None:
    """Return a list of whole numbers of 0 or more, or None for anything else."""
    if not isinstance(value, list):
        return None
    found = [whole(entry) for entry in value]
    return None if None in found else tuple(entry for entry in found if entry is not None)


def text(value: Any, most: int = MAX_NAME) -> str:
    """Return a string, printable and cut to `most` characters; empty if it is not a string."""
    if not isinstance(value, str):
        return ""
    clean = _UNPRINTABLE.sub("�", value[: most + 1])
    return clean if len(clean) <= most else clean[: most - 1] + "…"


def named_numbers(value: Any) -> dict[str, float]:
    """Return the entries of an object that are numbers, by their printable names."""
    if not isinstance(value, dict):
        return {}
    found = {text(name): number(entry) for name, entry in value.items()}
    return {name: entry for name, entry in found.items() if name and entry is not None}


def objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; none if the value is not a list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
