"""The error types of the package."""

from __future__ import annotations


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


class RankLostError(CollectiveError):
    """A rank has died, so that a collective cannot come about; the others may go on without it."""


class MissingRanksError(RuntimeError):
    """A monitored barrier that some rank did not reach; the process group is still good."""
