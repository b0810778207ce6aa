"""The error types of the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

OPERATION = "{operation}"
"""Stands in the text of a `CollectiveError` for what its raiser cannot know: what was called."""


def listed_ranks(ranks: Sequence[int], size: int) -> str:
    """Return `rank 2 of 4`, or `ranks 1, 3 of 4`; without any, `a rank of 4`."""
    if not ranks:
        return f"a rank of {size}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {size}"


class UserError(Exception):
    """A mistake in the user's input: shown as one line, without a traceback, exit code 2.

    The text says what was found, what was needed and what to do.
    """

    exit_code = 2


class AgreedError(UserError):
    """A `UserError` that every rank raises at the same point, so that rank 0 speaks for all."""

    def __init__(self, text: str, exit_code: int = UserError.exit_code) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class StorageError(UserError):
    """What a run needs to keep cannot be written, such as on a full disk; exit code 74.

    `kaitian-supervise` knows by the code that starting again would not help.
    """

    exit_code = 74  # EX_IOERR of sysexits.h


class UnsupportedError(RuntimeError):
    """A collective was asked for something the backend does not do; it is never done wrongly."""


class CollectiveError(RuntimeError):
    """A collective that did not come about: a rank is missing, or the ranks' calls differ.

    The process group cannot be used any more.
    """

    def in_operation(self, name: str) -> Self:
        """Return the same error with the operation named in it."""
        text = str(self)
        return type(self)(text.replace(OPERATION, name) if OPERATION in text else f"{name}: {text}")


class RankLostError(CollectiveError):
    """A rank has died, so that a collective cannot come about; the others may go on without it."""


class MissingRanksError(RuntimeError):
    """A monitored barrier that some rank did not reach; the process group is still good."""
