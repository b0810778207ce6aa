"""What owners have of an optimizer's state: small values, and large tensors.

A rank that looks at the whole state gets the small values, and the forms of the large tensors, at
once. It reads the large tensors one by one, when they are needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple, Protocol

import torch

from kaitian_mpi.integrations.shard.host_memory import HostMemory
from kaitian_mpi.integrations.shard.owned_model import OwnedModel
from kaitian_mpi.integrations.shard.owned_rows import (
    OPTIMIZER,
    Piece,
    in_order,
    put_rows,
)
from kaitian_mpi.integrations.shard.owner_reads import OwnerReads
from kaitian_mpi.integrations.shard.owners_value import OwnersValue, ValueSource
from kaitian_mpi.train.layouts.shard.row_states import join_states

_SMALL_FRACTION = 0.25

Form = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""A tensor's dtype, shape and strides."""


class StatePiece(NamedTuple):
    """The state of some rows of a parameter."""

    number: int
    """Of the parameter."""
    begin: int
    end: int
    names: list[str]
    """Of all values, in their order."""
    small: dict[str, Any]
    """All but the large tensors."""
    large: dict[str, Form]


class StateOwner(Protocol):
    """This rank's side of an optimizer, whose state is read: see `OwnedOptimizer`."""

    @property
    def index(self) -> int:
        """The optimizer's, the same on every rank."""

    def model_of(self, parameter: torch.Tensor) -> OwnedModel | None:
        """Return the model that has the owners of a parameter; None if it has none."""

    def own_state(self) -> Mapping[Any, Any]:
        """Return the state of this rank's rows."""

    def own_pieces(self, index: int, steps: int, *wanted: int) -> AbstractContextManager[Any]:
        """Make the context of what this rank has of the state of a model's parameters."""


class StateReader:
    """Reads the whole state of an optimizer, as it is after some step, from its owners."""

    def __init__(
        self, owned: StateOwner, steps: int, parameters: Sequence[torch.Tensor], reads: OwnerReads
    ) -> None:
        """Read nothing yet.

        Args:
            owned: this rank's side of the optimizer.
            steps: after which its state is read.
            parameters: that the optimizer steps, in their order.
            reads: from other ranks.
        """
        self._owned = owned
        self._steps = steps
        self._parameters = parameters
        self._reads = reads

    def collect(self) -> dict[int, Any]:
        """Return the states of the parameters by place; their large tensors are not read yet.

        Not collective.
        """
        models = [self._owned.model_of(parameter) for parameter in self._parameters]
        pieces_of: dict[tuple[int, int], list[StatePiece]] = {}
        rows_of = {model.rows.index: model.rows for model in models if model is not None}
        for index, rows in rows_of.items():
            wanted = OPTIMIZER, self._owned.index, index, self._steps
            for rank in rows.owners():
                for piece in starmap(StatePiece, self._reads.read(rank, *wanted)):
                    pieces_of.setdefault((index, piece.number), []).append(piece)
        states: dict[int, Any] = {}
        memory = HostMemory(self._parameters)
        for place, (parameter, model) in enumerate(zip(self._parameters, models, strict=True)):
            if model is None:
                state = self._owned.own_state()
                if parameter in state:
                    states[place] = dict(state[parameter])
                continue
            pieces = pieces_of.get((model.rows.index, model.number(parameter)))
            if pieces:  # else no rank has stepped it
                ordered = in_order([(p.begin, p.end, p) for p in pieces], parameter)
                states[place] = self._join(model, [piece for *_, piece in ordered], memory)
        return states

    def _join(
        self, model: OwnedModel, pieces: Sequence[StatePiece], memory: HostMemory
    ) -> dict[str, Any]:
        """Return the whole state of a parameter, of whose rows these are all pieces."""
        number, *_, names, _, large = pieces[0]
        joined = join_states([piece.small for piece in pieces], memory.keep)
        for name in large:
            source = ValueSource(
                _like([piece.large[name] for piece in pieces]),
                partial(self._read_large, model, number, name),
                _only_version,
                memory.empty,
            )
            joined[name] = OwnersValue.of(source)
        return {name: joined[name] for name in names}

    def _read_large(self, model: OwnedModel, number: int, name: str, values: torch.Tensor) -> None:
        """Read a large tensor into memory. Not collective.

        Raises:
            UserError: an owner has done another step since.
        """
        wanted = model.rows.index, self._steps, number, *name.encode()
        with self._owned.own_pieces(*wanted) as pieces:
            put_rows(pieces, values)
            all_pieces = [*pieces]
        for rank, spans in model.rows.spans_by_rank(number):
            arriving = [(begin, end, values[begin:end]) for begin, end in spans]
            self._reads.read_rows(rank, OPTIMIZER, self._owned.index, *wanted, into=arriving)
            all_pieces += arriving
        in_order(all_pieces, model.parameters[number])


def state_pieces(state: Mapping[Any, Any], model: OwnedModel) -> list[StatePiece]:
    """Return what this rank has of a state of a model's parameters, without large tensors."""
    small = small_numbers(model.parameters)
    return [
        _state_piece(number, part.begin, part.end, state[target], number in small)
        for number in range(len(model.parameters))
        for part, target in model.rows.parts_of(number)
        if target in state
    ]


def row_pieces(state: Mapping[Any, Any], model: OwnedModel, number: int, *name: int) -> list[Piece]:
    """Return this rank's rows of a large tensor, whose name is encoded, in a parameter's state."""
    return [
        (part.begin, part.end, state[target][bytes(name).decode()])
        for part, target in model.rows.parts_of(number)
    ]


def small_numbers(parameters: Sequence[torch.Tensor]) -> Collection[int]:
    """Return the numbers of parameters that together are small beside the largest one.

    The same on every rank.
    """
    left = _SMALL_FRACTION * max((parameter.nbytes for parameter in parameters), default=0)
    small = set[int]()
    for number in sorted(range(len(parameters)), key=lambda number: parameters[number].nbytes):
        left -= parameters[number].nbytes
        if left < 0:
            break
        small.add(number)
    return small


def _state_piece(
    number: int, begin: int, end: int, state: Mapping[str, Any], is_small: bool
) -> StatePiece:
    large = {} if is_small else {n: value for n, value in state.items() if _is_large(value)}
    small = {name: value for name, value in state.items() if name not in large}
    forms = {name: (t.dtype, tuple(t.shape), t.stride()) for name, t in large.items()}
    return StatePiece(number, begin, end, [*state], small, forms)


def _is_large(value: Any) -> bool:
    """Return whether a value may be read by itself, into memory for all of its elements."""
    return (
        type(value) is torch.Tensor
        and value.dim() > 0
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_conj() or value.is_neg())
    )


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
