"""This rank's rows of a model's parameters, and the other ranks' reads of them."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from kaitian_mpi.balance.ownership import Part
from kaitian_mpi.distributed.shard_buckets import rows_of_part
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.remote_reads import NOT_YET, ReadKind, RemoteReads, RowValues
from kaitian_mpi.runtime.polling import WaitContext
from kaitian_mpi.train.layouts.shard.row_states import Key, count_rows


class _OfRows(Protocol):
    """Anything of consecutive rows of a parameter."""

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...


_Piece = TypeVar("_Piece", bound=_OfRows)


class LocalRows:
    """What an optimizer steps on this rank: the rows of parameters that it owns.

    Rows of a parameter that is whole on each rank are views of it; rows of a sharded one have the
    only values. Other ranks may read these at any time, each the values of the step that it has
    done itself.

    Attributes:
        index: the index of the model, the same on every rank; -1 until `assign`.
        parts: the parts of all parameters, of all ranks; empty until `assign`.
        targets: this rank's rows, with a gradient of their own.
        lock: held while the rows change.
        steps: how many optimizer steps have changed the rows.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        rank: int,
        reads: RemoteReads,
        waits: WaitContext,
    ) -> None:
        """Own nothing yet.

        Args:
            parameters: those of the model, by their numbers.
            rank: this rank.
            reads: what reads from other ranks.
            waits: makes the context of waiting for other ranks.
        """
        self.parts: list[Part] = []
        self.targets: dict[Part, nn.Parameter] = {}
        self.lock = threading.RLock()
        self._parameters = parameters
        self._rank = rank
        self.index = -1
        self._reads = reads
        self._waits = waits
        # By the number of a parameter.
        self._memory: dict[int, Hashable] = {}  # that the rows are views of, see `_memory_of`
        self._parts_of: dict[int, list[tuple[Part, nn.Parameter]]] = {}
        # The begins and ends of the parts of a parameter that a rank owns.
        self._spans_of: dict[int, dict[int, list[tuple[int, int]]]] = {}
        self._sharded: frozenset[int] = frozenset()
        self.steps = 0
        self._changes: dict[int, int] = {}  # by the script itself, since the last step
        # The rows before each of these changes, which other ranks may still read.
        self._before: dict[tuple[int, int], list[RowValues]] = {}

    def assign(self, index: int, parts: list[Part], values: Mapping[Key, torch.Tensor]) -> None:
        """Own these parts. Not collective.

        Args:
            index: the index of the model, the same on every rank.
            parts: the parts of all parameters, of all ranks.
            values: this rank's rows of the sharded parameters.
        """
        self.index = index
        self._sharded = frozenset(number for number, _, _ in values)
        for part in parts:
            spans = self._spans_of.setdefault(part.parameter, {})
            spans.setdefault(part.owner, []).append((part.begin, part.end))
            if part.owner == self._rank:
                key = part.parameter, part.begin, part.end
                target = _target(self._parameters[part.parameter], part, values.get(key))
                self.targets[part] = target
                self._parts_of.setdefault(part.parameter, []).append((part, target))
        self.parts = parts  # from now on, other ranks may read them

    @property
    def nbytes(self) -> int:
        """How many bytes this rank's rows take."""
        return sum(rows.nbytes for rows in self.targets.values())

    def of(self, number: int) -> Sequence[nn.Parameter]:
        """Return this rank's rows of a parameter."""
        return [target for _, target in self.parts_of(number)]

    def parts_of(self, number: int) -> Sequence[tuple[Part, nn.Parameter]]:
        """Return this rank's parts of a parameter, and its rows of each."""
        return self._parts_of.get(number, ())

    def gradients(self, number: int) -> list[torch.Tensor]:
        """Return the gradients of this rank's rows of a parameter."""
        return [rows.grad for rows in self.of(number) if rows.grad is not None]

    def spans_by_rank(self, number: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Yield the other ranks that own rows of a parameter, with the spans of these."""
        for rank, spans in sorted(self._spans_of.get(number, {}).items()):
            if rank != self._rank:
                yield rank, spans

    def owners(self) -> list[int]:
        """Return the ranks that own a part of the model."""
        return sorted({part.owner for part in self.parts})

    def follow_data(self) -> None:
        """Be views of parameters again whose `data` was set since. Not collective.

        Raises:
            UserError: they have another dtype or shape now.
        """
        changed: dict[int, Hashable] = {}
        for number in self._parts_of:
            if number not in self._sharded:
                memory = _memory_of(self._parameters[number])
                if self._memory.get(number) != memory:
                    changed[number] = memory
        for part, target in self.targets.items() if changed else ():
            if part.parameter in changed:
                rows = rows_of_part(self._parameters[part.parameter], part)
                if rows.dtype != target.dtype or rows.shape != target.shape:
                    raise UserError(
                        f"--layout shard: a parameter was {target.dtype} {tuple(target.shape)} in "
                        f"the first forward and is {rows.dtype} {tuple(rows.shape)} now; convert "
                        "the model before"
                    )
                if rows.data_ptr() != target.data_ptr():
                    target.data = rows
        self._memory.update(changed)

    def clear(self, numbers: set[int]) -> None:
        """Clear the gradients of this rank's rows of some parameters. Not collective."""
        for number in numbers:
            for rows in self.of(number):
                rows.grad = None

    def end_step(self) -> None:
        """Take note of an optimizer's step, before `lock` is released."""
        self.steps += 1
        self._changes.clear()
        self._before.clear()

    def end_backward(self) -> None:
        """Take note that all ranks have computed their gradients of this step."""
        self._before.clear()

    def serve(self, number: int, steps: int, changes: int) -> Any:
        """Return this rank's pieces of a parameter; `NOT_YET` if its script is behind.

        Args:
            number: the number of the parameter.
            steps: how many steps the rank that asks has done.
            changes: how often its script has changed the parameter since.

        Raises:
            UserError: this rank has done another step.
        """
        with self.lock:
            if self.steps > steps:
                raise UserError(
                    f"--layout shard: a parameter of step {steps} was read when a rank had done "
                    f"step {self.steps}; read it between optimizer.step() and the next "
                    "backward(), and not from another thread"
                )
            if not self.parts or self.steps < steps or self._changes.get(number, 0) < changes:
                return NOT_YET
            if changes == self._changes.get(number, 0):
                # Copies, as the script may change the rows while they are sent.
                pieces = self._pieces(number)
                return copied_rows(pieces)
            before = self._before.get((number, changes))
            if before is None:
                raise UserError(
                    "--layout shard: a parameter was read that a rank has changed since; every "
                    "rank must change the same parameters as often as the others"
                )
            return before

    def version(self, number: int) -> tuple[int, int]:
        """Return the steps, and the script's changes to a parameter since, that it has."""
        return self.steps, self._changes.get(number, 0)

    def read(self, number: int, values: torch.Tensor) -> None:
        """Read a parameter's rows from their owners into memory for all of them. Not collective."""
        with self.lock:
            wanted = ReadKind.MODEL, self.index, number, *self.version(number)
            pieces = self._pieces(number)
            put_rows(pieces, values)
        with self._waits("the owners' rows"):
            for owner, spans in self.spans_by_rank(number):
                arriving = [RowValues(begin, end, values[begin:end]) for begin, end in spans]
                self._reads.read_rows(owner, *wanted, into=arriving)
                pieces += arriving
        in_order(pieces, self._parameters[number])

    @torch.no_grad()
    def write(self, number: int, values: torch.Tensor) -> None:
        """Take this rank's rows of a sharded parameter that the script has changed on each rank.

        Not collective.
        """
        with self.lock, torch._C.DisableTorchFunctionSubclass():
            changes = self._changes.get(number, 0)
            pieces = self._pieces(number)
            self._before[number, changes] = [
                RowValues(begin, end, rows.clone()) for begin, end, rows in pieces
            ]
            for begin, end, rows in pieces:
                rows.copy_(values[begin:end])
            self._changes[number] = changes + 1

    def _pieces(self, number: int) -> list[RowValues]:
        return [
            RowValues(part.begin, part.end, rows.detach()) for part, rows in self.parts_of(number)
        ]


def put_rows(pieces: Sequence[RowValues], values: torch.Tensor) -> None:
    """Copy rows to their places in the memory of a whole tensor, unless they are there already."""
    for begin, end, rows in pieces:
        place = values[begin:end]
        if (place.device, place.data_ptr()) != (rows.device, rows.data_ptr()):
            place.copy_(rows)


def copied_rows(pieces: Iterable[RowValues]) -> list[RowValues]:
    """Return copies of rows, in host memory."""
    return [RowValues(begin, end, rows.to("cpu", copy=True)) for begin, end, rows in pieces]


def in_order(pieces: Sequence[_Piece], parameter: torch.Tensor) -> list[_Piece]:
    """Return pieces in the order of their rows, after a check that these are all of a parameter's.

    An owner that has answered wrongly would else leave a gap of any numbers.
    """
    ordered = sorted(pieces, key=lambda piece: (piece.begin, piece.end))
    reached = 0
    for piece in ordered:
        if piece.begin != reached:
            break
        reached = piece.end
    if reached != count_rows(parameter):
        raise RuntimeError(
            f"{reached} of {count_rows(parameter)} rows of a parameter were read from its owners"
        )
    return ordered


def _memory_of(tensor: torch.Tensor) -> Hashable:
    """Return a value that differs once a tensor's `data` is set."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _target(parameter: nn.Parameter, part: Part, values: torch.Tensor | None) -> nn.Parameter:
    """Return what an optimizer steps for a part: its values, or else a view of the rows."""
    rows = rows_of_part(parameter, part) if values is None else values
    target = nn.Parameter(rows, requires_grad=parameter.requires_grad)
    vars(target).update(vars(parameter))  # an optimizer may look for marks of a model's
    return target
