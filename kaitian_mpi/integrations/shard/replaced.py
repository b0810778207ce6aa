"""Replaces attributes of torch's classes and modules, until they are restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def replace_all(values: Iterable[tuple[Any, str, Any]]) -> Callable[[], None]:
    """Set attributes of objects, and return what sets them as they were.

    Args:
        values: an object, the name of its attribute, and the new value, for each.
    """
    stock = []
    for owner, name, value in values:
        stock.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def restore() -> None:
        while stock:
            setattr(*stock.pop())

    return restore
