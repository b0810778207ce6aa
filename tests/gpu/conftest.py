"""Tests on a real accelerator; skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest
import stand_in

KIND, COUNT = stand_in.find()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if KIND:
        return
    skip = pytest.mark.skip(reason="no accelerator on this machine")
    for item in items:
        if "gpu" in item.path.parts[:-1]:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def kind() -> str:
    """The accelerator's kind."""
    return KIND


@pytest.fixture(scope="session")
def count() -> int:
    """How many of them there are."""
    return COUNT
