"""Dataclasses and named tuples, as JSON has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints


def rebuilt(kind: Any, content: Any) -> Any:
    """Return a `kind` of what `dataclasses.asdict` and JSON have made of one.

    Numbers and texts are not checked.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it was another.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:  # with None
        return None if content is None else rebuilt(inner[0], content)
    if origin is tuple:
        return tuple(rebuilt(inner[0], each) for each in content)
    if origin is Mapping:
        return {key: rebuilt(inner[1], value) for key, value in content.items()}
    if hasattr(kind, "_fields"):
        return kind(*content)
    if not is_dataclass(kind):
        return content
    if not isinstance(content, dict):
        raise TypeError(f"{content!r} is no object")
    hints = get_type_hints(kind)
    return kind(**{name: rebuilt(hints[name], value) for name, value in content.items()})  # type: ignore[operator]
