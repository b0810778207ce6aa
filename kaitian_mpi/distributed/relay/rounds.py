"""Tensors through the relay's buffers a part at a time: for collectives other than all_reduce.

They send to and receive from several tensors at once, so they share the buffers: in each round, a
part of every tensor has its place in them. Nothing overlaps within a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from kaitian_mpi.distributed.relay.pipeline import COUNT, Slots

_ALIGNMENT = 64  # bytes: a multiple of every dtype's size


class Piece(NamedTuple):
    """A tensor, on any device, that takes part in a collective."""

    tensor: torch.Tensor
    is_read: bool
    is_written: bool


def part_bytes(slot_bytes: int, pieces: int) -> int:
    """Return the length of the parts of so many tensors that fit in the slots together."""
    return max(_ALIGNMENT, slot_bytes // _per_slot(pieces) // _ALIGNMENT * _ALIGNMENT)


def act_in_rounds(
    pieces: Sequence[Piece],
    length: int,
    act: Callable[[list[torch.Tensor]], None],
    slots_of: Callable[[torch.device], Slots],
) -> None:
    """Call `act` with the pieces' parts in host memory, round by round.

    A round's parts are elements of the same range of each piece; they are empty if a piece has
    ended. Parts of host tensors are the tensors' own memory.

    Args:
        pieces: flat and contiguous; all on one device, or in host memory.
        length: of a part, as `part_bytes` says.
        act: works on the parts, listed as the pieces are.
        slots_of: returns the buffers for a device.
    """
    longest = max((piece.tensor.nbytes for piece in pieces), default=0)
    for start in range(0, max(longest, 1), length):
        parts = [
            tensor[start // (size := tensor.element_size()) : (start + length) // size]
            for tensor, _, _ in pieces
        ]
        hosts = _places(parts, slots_of)
        for piece, part, host in zip(pieces, parts, hosts, strict=True):
            if piece.is_read and host is not part:
                host.copy_(part)  # blocking: MPI reads as soon as this returns
        act(hosts)
        for piece, part, host in zip(pieces, parts, hosts, strict=True):
            if piece.is_written and host is not part:
                # torch does not allow writing its tensors outside of the mode.
                with torch.inference_mode() if part.is_inference() else nullcontext():
                    part.copy_(host)  # blocking: the next round writes to the buffer


def _places(
    parts: Sequence[torch.Tensor], slots_of: Callable[[torch.device], Slots]
) -> list[torch.Tensor]:
    """Return the host memory of each part: a place in the buffers, unless it is there already."""
    staged = [part for part in parts if not part.is_cpu and part.numel()]
    if not staged:
        return [part if part.is_cpu else torch.empty(0, dtype=part.dtype) for part in parts]
    stride = -(-max(part.nbytes for part in staged) // _ALIGNMENT) * _ALIGNMENT
    per_slot = _per_slot(len(staged))
    memory = slots_of(staged[0].device).take_all(len(staged), stride * per_slot)
    free = iter(
        each[place * stride : (place + 1) * stride] for each in memory for place in range(per_slot)
    )
    hosts = []
    for part in parts:
        if part.is_cpu:
            hosts.append(part)
        elif part.numel():
            hosts.append(next(free)[: part.nbytes].view(part.dtype))
        else:
            hosts.append(torch.empty(0, dtype=part.dtype))
    return hosts


def _per_slot(pieces: int) -> int:
    return -(-pieces // COUNT)
