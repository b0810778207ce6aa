"""What other ranks may read of this one: its rows of models, and their states in optimizers."""

from __future__ import annotations

import weakref
from typing import Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.local_optimizer_state import LocalOptimizerState
from kaitian_mpi.integrations.shard.local_rows import LocalRows
from kaitian_mpi.integrations.shard.remote_reads import NOT_YET, ReadKind


class ServedRegistry:
    """Maps a kind and an index to the rows, or the state, that other ranks may read.

    An index is given in the order in which models, or optimizers, become owned: that of all ranks.
    """

    def __init__(self) -> None:
        self._served: dict[ReadKind, list[LocalRows | LocalOptimizerState | None]] = {
            ReadKind.MODEL: [],
            ReadKind.OPTIMIZER: [],
        }
        self._deleted: list[tuple[ReadKind, int]] = []  # by this rank's script, of these

    def next_index(self, kind: ReadKind) -> int:
        """Return the index of what is added next."""
        return len(self._served[kind])

    def add(self, kind: ReadKind, owned: LocalRows | LocalOptimizerState, of: object) -> None:
        """Serve what this rank owns of a model or an optimizer, until the script deletes `of`."""
        index = self.next_index(kind)
        self._served[kind].append(owned)
        weakref.finalize(of, self._deleted.append, (kind, index)).atexit = False

    def free_deleted(self) -> int:
        """Free what the script has deleted; return how many bytes the rows of its models take.

        To be called when all ranks have come as far, as another one may read it until then.
        """
        rows_bytes = 0
        while self._deleted:
            kind, index = self._deleted.pop()
            owned = self._served[kind][index]
            if isinstance(owned, LocalRows):
                rows_bytes += owned.nbytes
            del owned  # the last reference to an optimizer's state may be the last to its models
            self._served[kind][index] = None
        return rows_bytes

    def serve(self, kind: int, index: int, *numbers: int) -> Any:
        """Return what `serve` of the rows or the state returns; `NOT_YET` without an owner.

        Raises:
            UserError: this rank's script has deleted it, or is ahead.
        """
        served = self._served[ReadKind(kind)]
        if index >= len(served):
            return NOT_YET
        owned = served[index]
        if owned is None:
            raise UserError(
                "--layout shard: a rank reads a model or an optimizer that other ranks' scripts "
                "have deleted; delete it on all ranks, or on none"
            )
        return owned.serve(*numbers)
