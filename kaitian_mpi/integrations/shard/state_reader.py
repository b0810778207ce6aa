"""Reads the whole state of an optimizer from the ranks that own its rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import starmap
from typing import Any

import torch

from kaitian_mpi.integrations.shard.host_memory import HostMemory
from kaitian_mpi.integrations.shard.lazy_value import LazyValue, ValueSource
from kaitian_mpi.integrations.shard.local_optimizer_state import (
    Form,
    LocalOptimizerState,
    StatePiece,
)
from kaitian_mpi.integrations.shard.local_rows import in_order, put_rows
from kaitian_mpi.integrations.shard.owned_model import OwnedModel
from kaitian_mpi.integrations.shard.remote_reads import ReadKind, RemoteReads, RowValues
from kaitian_mpi.train.layouts.shard.row_states import join_states


class StateReader:
    """Reads the whole state of an optimizer, as it is when this is made, from its owners."""

    def __init__(
        self, owned: LocalOptimizerState, parameters: Sequence[torch.Tensor], reads: RemoteReads
    ) -> None:
        """Read nothing yet.

        Args:
            owned: the state of this rank's rows.
            parameters: those that the optimizer steps, in their order.
            reads: what reads from other ranks.
        """
        self._owned = owned
        self._steps = owned.steps
        self._parameters = parameters
        self._reads = reads

    def collect(self) -> dict[int, Any]:
        """Return the states of the parameters by place; their large tensors are not read yet.

        Not collective.
        """
        with self._owned.lock:
            own = self._owned.state_after(self._steps)
        models = [self._owned.find_model(parameter) for parameter in self._parameters]
        pieces_of: dict[tuple[int, int], list[StatePiece]] = {}
        rows_of = {model.rows.index: model.rows for model in models if model is not None}
        for index, rows in rows_of.items():
            wanted = ReadKind.OPTIMIZER, self._owned.index, index, self._steps
            for rank in rows.owners():
                for piece in starmap(StatePiece, self._reads.read(rank, *wanted)):
                    pieces_of.setdefault((index, piece.number), []).append(piece)
        states: dict[int, Any] = {}
        memory = HostMemory(self._parameters)
        for place, (parameter, model) in enumerate(zip(self._parameters, models, strict=True)):
            if model is None:
                if parameter in own:
                    states[place] = dict(own[parameter])
                continue
            pieces = pieces_of.get((model.rows.index, model.number(parameter)))
            if pieces:  # else no rank has stepped it
                states[place] = self._join(model, in_order(pieces, parameter), memory)
        return states

    def _join(
        self, model: OwnedModel, pieces: Sequence[StatePiece], memory: HostMemory
    ) -> dict[str, Any]:
        """Return the whole state of a parameter, of whose rows these are all pieces."""
        first = pieces[0]
        joined = join_states([piece.small for piece in pieces], memory.keep)
        for name in first.large:
            source = ValueSource(
                _like([piece.large[name] for piece in pieces]),
                partial(self._read_large, model, first.number, name),
                _only_version,
                memory.empty,
            )
            joined[name] = LazyValue.of(source)
        return {name: joined[name] for name in first.names}

    def _read_large(self, model: OwnedModel, number: int, name: str, values: torch.Tensor) -> None:
        """Read a large tensor into memory. Not collective.

        Raises:
            UserError: an owner has done another step since.
        """
        wanted = model.rows.index, self._steps, number, *name.encode()
        with self._owned.pieces(*wanted) as pieces:
            put_rows(pieces, values)
            all_pieces = [*pieces]
        for rank, spans in model.rows.spans_by_rank(number):
            arriving = [RowValues(begin, end, values[begin:end]) for begin, end in spans]
            self._reads.read_rows(
                rank, ReadKind.OPTIMIZER, self._owned.index, *wanted, into=arriving
            )
            all_pieces += arriving
        in_order(all_pieces, model.parameters[number])


def _like(forms: Sequence[Form]) -> torch.Tensor:
    """Return a tensor on meta as that of tensors of these forms, concatenated by rows."""
    tensors = [
        torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        for dtype, shape, strides in forms
    ]
    if all(tensor.is_contiguous() for tensor in tensors):  # concatenation on meta is slow
        shape = sum(map(len, tensors)), *tensors[0].shape[1:]
        return torch.empty(shape, dtype=tensors[0].dtype, device="meta")
    return torch.cat(tensors)


def _only_version() -> int:
    return 0
