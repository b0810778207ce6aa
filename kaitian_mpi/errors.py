"""The error types of the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

OPERATION_PLACEHOLDER = "{operation}"
"""Placeholder for the name of the operation in a `CollectiveError`: its raiser may not know it."""


def format_ranks(ranks: Sequence[int], size: int) -> str:
    """Return `rank 2 of 4` or `ranks 1, 3 of 4`; if `ranks` is empty, `a rank of 4`."""
    if not ranks:
        return f"a rank of {size}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {size}"


class UserError(Exception):
    """An error in the user's input: printed as one line without a traceback; exit code 2.

    The message says what is wrong and what to do.
    """

    exit_code = 2


class AgreedError(UserError):
    """A `UserError` that every rank raises at the same point, so that only rank 0 prints it."""

    def __init__(self, text: str, exit_code: int = UserError.exit_code) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class LayerTooLargeError(AgreedError):
    """A rank's device has too little memory for a layer of the model, or the whole, to be timed."""


class StorageError(UserError):
    """The run cannot write its results or checkpoints, e.g. the disk is full; exit code 74.

    From this exit code `kaitian-supervise` knows that a restart would not help.
    """

    exit_code = 74  # EX_IOERR of sysexits.h


class UnsupportedError(RuntimeError):
    """The backend does not support this operation; raised instead of a wrong result."""


class CollectiveError(RuntimeError):
    """A collective failed: a rank is missing, or the ranks' calls differ.

    The process group cannot be used afterwards.
    """

    def with_operation(self, name: str) -> Self:
        """Return the same error with the operation's name in its message."""
        text = str(self)
        return type(self)(
            text.replace(OPERATION_PLACEHOLDER, name)
            if OPERATION_PLACEHOLDER in text
            else f"{name}: {text}"
        )


class RankLostError(CollectiveError):
    """A rank died, so a collective cannot complete; the other ranks may continue without it."""
