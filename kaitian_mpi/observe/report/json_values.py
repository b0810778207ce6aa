"""Reads JSON that may be damaged: a file that a crash has cut, or values of a wrong type."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_TEXT = 400
_MAX_NAME = 48
_MAX_WHOLE = 1 << 53


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; NaN and infinities in it are None.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a JSON object; the message says why.
    """
    _require_regular_file(path)
    return _parse(path.read_bytes())


def read_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the object in each line of a JSON lines file; None for a line that is not one.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a regular file.
    """
    _require_regular_file(path)
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                try:
                    yield _parse(line)
                except ValueError:
                    yield None


def _require_regular_file(path: Path) -> None:
    if not stat.S_ISREG(path.stat().st_mode):  # reading a FIFO would wait forever
        raise ValueError("not a regular file")


def _parse(content: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(content, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise ValueError("not valid JSON") from error
    if not isinstance(parsed, dict):
        raise ValueError("not a JSON object")
    return parsed


def number(value: Any) -> float | None:
    """Return a finite number, or None for anything else, such as a bool."""
    is_number = type(value) in (int, float) and abs(value) <= sys.float_info.max
    return float(value) if is_number else None


def whole(value: Any) -> int | None:
    """Return a whole number of 0 or more, or None for anything else."""
    found = number(value)
    is_whole = found is not None and 0 <= found <= _MAX_WHOLE and found == int(found)
    return int(value) if is_whole else None


def wholes(value: Any) -> tuple[int, ...]:
    """Return a list of whole numbers of 0 or more; empty for anything else."""
    found = [whole(entry) for entry in value] if isinstance(value, list) else []
    return () if None in found else tuple(entry for entry in found if entry is not None)


def text(value: Any, most: int = _MAX_NAME) -> str:
    """Return a string, printable and cut to `most` characters; empty if it is not a string."""
    if not isinstance(value, str):
        return ""
    clean = "".join(each if each.isprintable() else "�" for each in value[: most + 1])
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
