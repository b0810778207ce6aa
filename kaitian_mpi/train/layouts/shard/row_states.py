"""States of rows of parameters, as optimizers keep them: cut, joined, and moved between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.train.state_transfer import copy_state, is_whole, send_state

if TYPE_CHECKING:
    from mpi4py import MPI

Key = tuple[int, int, int]
"""A parameter's number, and the rows from one to before another."""


class HeldRows(NamedTuple):
    """Consecutive rows of a parameter that a rank has."""

    rank: int
    begin: int
    end: int


Keep = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Makes consecutive rows one tensor of this rank's own, in host memory."""


def move_states(
    comm: MPI.Intracomm,
    held: Mapping[Key, dict[str, Any]],
    wanted: Iterable[tuple[Key, int]],
    keep: Keep,
    on_piece: Callable[[], None] = lambda: None,
) -> dict[Key, dict[str, Any]]:
    """Return the states that this rank wants, from the ranks that have them. Collective.

    Args:
        comm: of the ranks.
        held: this rank's states.
        wanted: what each is of, and which rank wants it; the same on every rank.
        keep: is given the rows of each tensor.
        on_piece: called whenever a piece of what this rank wants has arrived or is kept.
    """
    sources = find_sources(comm, held)
    states: dict[Key, dict[str, Any]] = {}
    for key, target in wanted:
        pieces = []
        for source, rows in cover(sources, key, target):
            piece = None
            if comm.rank == source.rank:
                source_key = key[0], source.begin, source.end
                piece = cut_state(held[source_key], source_key, rows)
            if source.rank != target:
                piece = send_state(comm, piece, source.rank, target, on_piece)
            pieces.append(piece)
        if comm.rank == target:
            states[key] = join_states([piece for piece in pieces if piece is not None], keep)
            on_piece()
    return states


def find_sources(comm: MPI.Intracomm, keys: Iterable[Key]) -> dict[int, list[HeldRows]]:
    """Return the rows that the ranks have, by the number of their parameter. Collective."""
    sources: dict[int, list[HeldRows]] = {}
    for rank, rank_keys in enumerate(gather_values(comm, [*keys])):
        for number, begin, end in rank_keys:
            sources.setdefault(number, []).append(HeldRows(rank, begin, end))
    return sources


def cover(
    sources: Mapping[int, Sequence[HeldRows]], wanted: Key, target: int = -1
) -> Iterator[tuple[HeldRows, tuple[int, int]]]:
    """Yield whose rows to take for those that are wanted, and the begin and end of what to take.

    Several ranks may have the same rows, and the rows of two may overlap: rank `target` takes its
    own.
    """
    number, at, end = wanted
    while at < end:
        fits = [rows for rows in sources.get(number, ()) if rows.begin <= at < rows.end]
        if not fits:
            return
        best = max(fits, key=lambda rows: (rows.rank == target, rows.end, -rows.rank))
        until = min(end, best.end)
        yield best, (at, until)
        at = until


def cut_state(state: Mapping[str, Any], key: Key, rows: tuple[int, int]) -> dict[str, Any]:
    """Return the state of some rows."""
    _, begin, end = key
    if rows == (begin, end):
        return dict(state)
    cut = {}
    for name, value in state.items():
        if _has_rows(value, end - begin):
            value = value[rows[0] - begin : rows[1] - begin]
            if value.stride(0) == 0:  # all rows have the memory of one number: see `ShardedModel`
                value = value.clone(memory_format=torch.contiguous_format)
        cut[name] = value
    return cut


def join_states(pieces: Sequence[Mapping[str, Any]], keep: Keep) -> dict[str, Any]:
    """Return one state of the states of consecutive rows."""
    joined: dict[str, Any] = {}
    for name, first in (pieces[0] if pieces else {}).items():
        if _is_tensor(first):
            joined[name] = keep([piece[name] for piece in pieces])
        else:  # as the number of steps, which is that of all rows
            joined[name] = copy_state(first)
    return joined


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _has_rows(value: Any, rows: int) -> bool:
    return _is_tensor(value) and len(value) == rows


def keep_rows(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return consecutive rows as one tensor: without a copy, if it is one that has memory alone."""
    return rows[0] if len(rows) == 1 and is_whole(rows[0]) else copy_rows(rows)


def copy_rows(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a copy of consecutive rows as one tensor, in host memory."""
    return copy_state(rows[0]) if len(rows) == 1 else torch.cat([piece.cpu() for piece in rows])


def count_rows(parameter: torch.Tensor) -> int:
    """Return the length of a parameter's first dimension; 1 without dimensions."""
    return len(parameter) if parameter.dim() else 1
