"""What every mistake of a user's has in common."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kaitian_mpi.errors import UserError


@contextmanager
def one_line_error(message: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Check that the block raises a `UserError` of one line, in which `message` is found."""
    with pytest.raises(UserError, match=message) as caught:
        yield caught
    assert "\n" not in str(caught.value)
