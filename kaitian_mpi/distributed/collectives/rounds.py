"""Long tensors of an accelerator in host memory: in rounds, by the relay's buffers.

A copy of a whole one would be in memory that is not page-locked, which is scarce: copies to and
from that are several times slower, and block. In rounds, one part is copied while MPI moves others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from kaitian_mpi.distributed.collectives.staging import contiguous, from_host, to_host
from kaitian_mpi.distributed.relay.chunking import longest_chunk
from kaitian_mpi.mpi import pairwise

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.distributed.relay.relay import Relay
    from kaitian_mpi.mpi.datatypes import Reduction

Tensors = Sequence[torch.Tensor]

_ROUND_BYTES = 8 << 20  # of all ranks' pieces, what is copied at once
_LEAST_CUT_BYTES = 64 << 10  # of a message


def in_rounds(
    comm: MPI.Comm,
    relay: Relay,
    tensor: torch.Tensor,
    exchange: Callable[[torch.Tensor], None],
    *,
    reads: bool,
    writes: bool,
) -> None:
    """Apply `exchange` to parts of a tensor in host memory, the same on every rank. Collective.

    Parts that it `reads` are copied out, and those that it `writes` are copied back.
    """
    dense = contiguous(tensor)
    rounds = [
        ([part] if reads else [], [part] if writes else [])
        for part in relay.split(comm, dense.view(-1))
    ]
    relay.exchange_in_rounds(rounds, lambda sent, received: exchange([*sent, *received][0]))
    if writes:
        from_host(dense, tensor)


def exchange_in_rounds(
    comm: MPI.Comm, relay: Relay, sent: pairwise.Pieces, received: pairwise.Pieces
) -> None:
    """Send `sent[r]` to rank r and receive `received[r]` from it, as `pairwise.exchange` does.

    In parts of so many bytes that only a message's length counts: of two ranks, both know in which
    rounds there is one. Collective.
    """
    sources, targets = _contiguous_on_one_device(sent, received)
    sources = pairwise.without_shared_memory(comm.rank, sources, targets)
    _copy_own(sources[comm.rank], targets[comm.rank])
    leaving = _bytes_by_peer(comm.rank, sources)
    arriving = _bytes_by_peer(comm.rank, targets)

    def exchange(leaving_parts: Tensors, arriving_parts: Tensors) -> None:
        pairwise.exchange(
            comm,
            _by_rank(comm.size, leaving, leaving_parts),
            _by_rank(comm.size, arriving, arriving_parts),
        )

    step = _cut_bytes(relay, comm, 2 * comm.size)
    relay.exchange_in_rounds(_cut_into_rounds(step, leaving, arriving), exchange)
    for target, piece in zip(targets, received, strict=True):
        if target is not None and piece is not None:
            from_host(target, piece)


def _contiguous_on_one_device(
    sent: pairwise.Pieces, received: pairwise.Pieces
) -> tuple[pairwise.Pieces, pairwise.Pieces]:
    """Return tensors with what is sent, and tensors for what is received; copies if needed."""
    pieces = [piece for piece in (*sent, *received) if piece is not None]
    is_mixed = len({piece.device for piece in pieces}) > 1
    # One copy of each, as a gather sends the same tensor to all ranks.
    copies = {
        id(piece): to_host(piece) if is_mixed else contiguous(piece)
        for piece in sent
        if piece is not None
    }
    targets = [
        None if piece is None else to_host(piece, read=False) if is_mixed else contiguous(piece)
        for piece in received
    ]
    return [None if piece is None else copies[id(piece)] for piece in sent], targets


def _copy_own(source: torch.Tensor | None, target: torch.Tensor | None) -> None:
    """Copy what this rank sends to itself."""
    if source is not None and target is not None and pairwise.is_copied(source, target):
        _bytes_of(target).copy_(_bytes_of(source))


def _bytes_by_peer(rank: int, pieces: pairwise.Pieces) -> dict[int, torch.Tensor]:
    """Return the bytes of the pieces that go to, or come from, each other rank.

    The same tensor for each rank that the same piece is sent to, so that it is copied once.
    """
    flat = {id(piece): _bytes_of(piece) for piece in pieces if piece is not None}
    return {
        peer: flat[id(piece)]
        for peer, piece in enumerate(pieces)
        if piece is not None and peer != rank
    }


def _cut_bytes(relay: Relay, comm: MPI.Comm, pieces: int) -> int:
    """Return the length of each of a round's pieces, the same on every rank. Collective."""
    return max(_LEAST_CUT_BYTES, min(_ROUND_BYTES, relay.longest_chunk(comm)) // pieces)


def _cut_into_rounds(
    step: int, leaving: Mapping[int, torch.Tensor], arriving: Mapping[int, torch.Tensor]
) -> list[tuple[Tensors, Tensors]]:
    """Return the parts of each round, which are empty where a rank's piece has ended."""
    longest = max((piece.numel() for piece in (*leaving.values(), *arriving.values())), default=0)
    rounds: list[tuple[Tensors, Tensors]] = []
    for start in range(0, longest, step):
        cut = {id(piece): piece[start : start + step] for piece in leaving.values()}
        sent = [cut[id(piece)] for piece in leaving.values()]
        rounds.append((sent, [piece[start : start + step] for piece in arriving.values()]))
    return rounds


def _by_rank(size: int, ranks: Iterable[int], parts: Tensors) -> list[torch.Tensor | None]:
    """Return a list with each rank's part; None for other ranks."""
    placed: list[torch.Tensor | None] = [None] * size
    for rank, part in zip(ranks, parts, strict=True):
        placed[rank] = part
    return placed


def _bytes_of(dense: torch.Tensor) -> torch.Tensor:
    return dense.view(-1).view(torch.uint8)


def reduce_scatter_in_rounds(
    comm: MPI.Comm, relay: Relay, output: torch.Tensor, pieces: Tensors, op: Reduction
) -> bool:
    """Reduce `pieces[r]` into `output` on rank r if these are long and on a device.

    Returns whether they were. Other ranks may reduce theirs at once. Collective.
    """
    longest = max(piece.numel() for piece in pieces)
    size = output.element_size()
    is_short = comm.size * longest * size <= 2 * _ROUND_BYTES
    if is_short or any(tensor.is_cpu for tensor in (output, *pieces)):
        return False
    dense = contiguous(output)
    result = dense.view(-1)
    parts = [contiguous(piece).view(-1) for piece in pieces]
    least = pairwise.elements_per_piece(comm, output)
    most = min(_ROUND_BYTES, longest_chunk(relay.settings.relay_memory_mb)) // size
    step = least * max(1, most // ((comm.size + 1) * least))
    rounds = [
        ([part[start : start + step] for part in parts], [result[start : start + step]])
        for start in range(0, longest, step)
    ]

    def exchange(sent: Tensors, received: Tensors) -> None:
        pairwise.reduce_scatter(comm, received[0], sent, op)

    relay.exchange_in_rounds(rounds, exchange)
    from_host(dense, output)
    return True


def all_gather_in_rounds(
    comm: MPI.Comm, relay: Relay, pieces: Tensors, tensor: torch.Tensor
) -> None:
    """Gather every rank's tensor into `pieces`; the ranks' rounds are alike. Collective."""
    others = [piece for rank, piece in enumerate(pieces) if rank != comm.rank]
    is_mixed = len({value.device for value in (tensor, *pieces)}) > 1
    copy = to_host if is_mixed else contiguous
    source = copy(tensor).view(-1)
    dense = [copy(piece) for piece in others]
    flat = [piece.view(-1) for piece in dense]
    step = _cut_bytes(relay, comm, comm.size) // tensor.element_size()
    rounds = [
        ([source[start : start + step]], [piece[start : start + step] for piece in flat])
        for start in range(0, max(piece.numel() for piece in pieces), step)
    ]

    def exchange(sent: Tensors, received: Tensors) -> None:
        targets: list[torch.Tensor | None] = [*received]
        targets.insert(comm.rank, None)
        pairwise.exchange(comm, [*sent] * comm.size, targets)

    relay.exchange_in_rounds(rounds, exchange)
    for gathered, piece in zip(dense, others, strict=True):
        from_host(gathered, piece)
    target = pieces[comm.rank].detach()
    if target.data_ptr() != tensor.data_ptr():
        target.copy_(tensor.detach().view(target.shape))
