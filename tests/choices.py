"""Parameters of tests of which `bin/test` runs some, and `bin/test --all` all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def by_default(
    values: Iterable[Any], chosen: Collection[Any], ranks: Collection[int] = ()
) -> list[Any]:
    """Return the values for `parametrize`; those that are not chosen are marked `thorough`.

    With `ranks`, that is on these numbers of ranks only.
    """
    thorough = pytest.mark.thorough(*ranks)
    return [
        value if value in chosen else pytest.param(*_parts(value), marks=thorough)
        for value in values
    ]


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
