"""Parameters of tests of which `bin/test` runs some, and `bin/test --all` all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def by_default(values: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Return the values for `parametrize`; those that are not chosen are marked `thorough`."""
    return [
        value if value in chosen else pytest.param(*_parts(value), marks=pytest.mark.thorough)
        for value in values
    ]


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
