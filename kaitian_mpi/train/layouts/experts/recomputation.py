"""Mixtures inside of activation checkpoints, which backward computes again with all ranks."""

from __future__ import annotations

import sys
from types import FrameType

from kaitian_mpi.errors import UserError

_MODULE = "torch.utils.checkpoint"
_IN_BACKWARD = "unpack_hook"  # which needs what a checkpoint has not kept


class Recomputation:
    """Knows which calls of mixtures backward is to compute again here.

    All ranks compute a mixture again, or none: one whose loss does not depend on it would not, and
    the others would wait for it forever.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[int, int]] = []

    def called(self, number: int, mixture: int) -> None:
        """Note a call of a mixture, with gradients."""
        within = _functions_of_checkpoints()
        if _IN_BACKWARD in within:
            before = [call for call in self._pending if call[1] == mixture]
            if before:
                self._pending.remove(before[-1])
        elif within:
            self._pending.append((number, mixture))

    def check(self, number: int, mixture: str) -> None:
        """Check that a call on which no loss here depends is not computed again elsewhere.

        Raises:
            UserError: it may be.
        """
        if any(pending == number for pending, _ in self._pending):
            raise UserError(
                f"--layout experts: {mixture} is inside an activation checkpoint, and this rank's "
                "loss does not depend on it, so that the others would compute it again without "
                "this rank; let every rank's loss depend on it, or leave out the checkpoint"
            )

    def reset(self) -> None:
        """Forget all calls."""
        self._pending = []


def _functions_of_checkpoints() -> set[str]:
    """Return the names of those functions of torch's checkpoints that have called this one."""
    names: set[str] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE:
            names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names
