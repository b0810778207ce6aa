"""The state of this rank's rows in an optimizer, and the other ranks' reads of it.

A rank that looks at the whole state gets the small values, and the forms of the large tensors, at
once. It reads the large tensors one by one, when they are needed.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.local_rows import copied_rows
from kaitian_mpi.integrations.shard.owned_model import OwnedModel
from kaitian_mpi.integrations.shard.remote_reads import NOT_YET, RowValues
from kaitian_mpi.train.state_transfer import copy_state

_SMALL_FRACTION = 0.25

FindModel = Callable[[torch.Tensor], "OwnedModel | None"]

Form = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""A tensor's dtype, shape and strides."""


class StatePiece(NamedTuple):
    """The state of some rows of a parameter."""

    number: int
    """The number of the parameter."""
    begin: int
    end: int
    names: list[str]
    """The names of all values, in their order."""
    small: dict[str, Any]
    """All but the large tensors."""
    large: dict[str, Form]
    """The large tensors' forms."""


class LocalOptimizerState:
    """The state of this rank's rows in an optimizer.

    Other ranks may read it at any time, each as it is after the step that it has done itself.

    Attributes:
        index: the index of the optimizer, the same on every rank.
        find_model: returns the model of a parameter; None if it is in no DDP.
        models: those that the optimizer steps.
        current: the state by row tensor, as an optimizer has it.
        steps: how often it has changed.
        lock: held while it changes.
    """

    def __init__(self, index: int, find_model: FindModel) -> None:
        """Have no state yet.

        Args:
            index: the index of the optimizer, the same on every rank.
            find_model: returns the model of a parameter; None if it is in no DDP.
        """
        self.index = index
        self.models: Sequence[OwnedModel] = ()
        self.current: defaultdict[Any, Any] = defaultdict(dict)
        self.steps = 0
        self.lock = threading.RLock()
        self.find_model = find_model
        # By the steps: states that the script has replaced, as by load_state_dict. A rank may still
        # save the old one while another has loaded; all have once they have computed a backward.
        self._before: dict[int, Mapping[Any, Any]] = {}

    def set_models(self, models: Sequence[OwnedModel]) -> None:
        """Take note of which models the optimizer steps from now on."""
        self.models = models

    def take_back(self, state: defaultdict[Any, Any]) -> None:
        """Have what the optimizer has made of the current state, before `lock` is released."""
        self.current = state

    def end_step(self) -> None:
        """Take note of a step of the optimizer, before `lock` is released."""
        self.steps += 1

    def replace(self, state: defaultdict[Any, Any]) -> None:
        """Have another state, which the script sets on each rank.

        Until the next backward, ranks whose scripts have not come as far may read the former.
        """
        with self.lock:
            self._before[self.steps] = self.current
            self.current = state
            self.steps += 1

    def end_backward(self) -> None:
        """Take note that no rank reads the states of earlier steps any more."""
        self._before.clear()

    def state_after(self, steps: int) -> Mapping[Any, Any]:
        """Return the state, by row tensor, that this rank had after so many steps.

        Raises:
            UserError: it is not kept any more.
        """
        state = self.current if steps == self.steps else self._before.get(steps)
        if state is None:
            raise UserError(
                "--layout shard: an optimizer's state_dict was read after the optimizer's next "
                "step; read it before the next backward(), in the thread that trains, or keep "
                "copy.deepcopy(state_dict)"
            )
        return state

    @contextmanager
    def pieces(self, index: int, steps: int, *wanted: int) -> Iterator[Any]:
        """Yield what this rank has of the state of a model's parameters, unchanged in the block.

        Args:
            index: the index of the model.
            steps: the number of steps after which the state is wanted; this rank has done as many.
            wanted: the number of a parameter and the encoded name of a large tensor, of whose rows
                these are pieces; else they are a `StatePiece` of each part of a parameter.

        Raises:
            UserError: the state has changed since so many steps.
        """
        with self.lock:
            state = self.state_after(steps)
            pieces_of = _row_pieces if wanted else _state_pieces
            models = [model for model in self.models if model.rows.index == index]
            yield [piece for model in models for piece in pieces_of(state, model, *wanted)]

    def serve(self, index: int, steps: int, *wanted: int) -> Any:
        """Return `pieces` to a rank that has done so many steps; `NOT_YET` if it is ahead."""
        with self.lock:
            if self.steps < steps:
                return NOT_YET
            with self.pieces(index, steps, *wanted) as pieces:
                # Copies, as the script may change the state while they are sent.
                if wanted:
                    return copied_rows(pieces)
                return [tuple(p._replace(small=copy_state(p.small))) for p in pieces]


def _small_numbers(parameters: Sequence[torch.Tensor]) -> Collection[int]:
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


def _state_pieces(state: Mapping[Any, Any], model: OwnedModel) -> list[StatePiece]:
    """Return what this rank has of a state of a model's parameters, without large tensors."""
    small = _small_numbers(model.parameters)
    return [
        _state_piece(number, part.begin, part.end, state[target], number in small)
        for number in range(len(model.parameters))
        for part, target in model.rows.parts_of(number)
        if target in state
    ]


def _row_pieces(
    state: Mapping[Any, Any], model: OwnedModel, number: int, *name: int
) -> list[RowValues]:
    """Return this rank's rows of a large tensor, whose name is encoded, in a parameter's state."""
    return [
        RowValues(part.begin, part.end, state[target][bytes(name).decode()])
        for part, target in model.rows.parts_of(number)
    ]


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
