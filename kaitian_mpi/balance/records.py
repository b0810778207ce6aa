"""Rebuilds dataclasses and named tuples from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints


def rebuild(kind: Any, content: Any) -> Any:
    """Return a `kind` from the JSON form of `dataclasses.asdict`.

    The types of numbers and strings are not checked.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: the content is not that of a `kind`.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:  # X | None
        return None if content is None else rebuild(inner[0], content)
    if origin is tuple:
        return tuple(rebuild(inner[0], item) for item in content)
    if origin is Mapping:
        return {key: rebuild(inner[1], value) for key, value in content.items()}
    if hasattr(kind, "_fields"):
        return kind(*content)
    if not is_dataclass(kind):
        return content
    if not isinstance(content, dict):
        raise TypeError(f"{content!r} is not a JSON object")
    hints = get_type_hints(kind)
    return kind(**{name: rebuild(hints[name], value) for name, value in content.items()})  # type: ignore[operator]
