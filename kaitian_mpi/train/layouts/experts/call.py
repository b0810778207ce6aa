"""One forward of a mixture of experts over all ranks, and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from kaitian_mpi.distributed.experts import Experts
from kaitian_mpi.errors import UserError
from kaitian_mpi.train.layouts.experts.dispatch import Dispatch, Tags
from kaitian_mpi.train.layouts.experts.dispatcher import Dispatcher
from kaitian_mpi.train.layouts.experts.headers import DTYPES, CallHeader, Headers
from kaitian_mpi.train.layouts.experts.incoming import RowsAsTheyArrive, RowsInOrder
from kaitian_mpi.train.layouts.experts.places import ExpertPlaces


class MixtureCall:
    """The rows that all ranks send to a mixture's experts at one point of a forward.

    What a rank sends to another is cut into chunks of consecutive rows, so that each has rows of
    few experts, and these are computed together.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        places: ExpertPlaces,
        experts: Experts,
        number: int,
        counts: Sequence[int],
        wanted: Sequence[int],
    ) -> None:
        """Prepare the call of this number since the start.

        `counts` are this rank's rows by expert, in the order of `places`; `wanted` those before any
        were dropped.
        """
        self.number = number
        self.mixture = places.number_of(experts)
        self.by_expert: list[int] = []
        """What all ranks wanted, after `forward`."""
        self._dispatcher = dispatcher
        self._chunks = dispatcher.chunks
        self._places = places
        self._experts = experts
        self._counts = list(counts)
        self._wanted = list(wanted)
        self._needs_gradient = torch.is_grad_enabled()
        held = places.held(self.mixture)
        self._held = held[self._dispatcher.links.rank]
        self._expert_ends = [0, *accumulate(map(len, held))]
        self._rows_to = [sum(self._of_rank(self._counts, rank)) for rank in range(len(held))]
        self._like = torch.empty(0)
        self._tape: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        """The leaf and the output of each chunk computed here, by the rank that sent it."""

    def _of_rank(self, numbers: Sequence[int], rank: int) -> Sequence[int]:
        """Return the numbers of the experts that a rank holds, given one number for each expert."""
        return numbers[self._expert_ends[rank] : self._expert_ends[rank + 1]]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the outputs for this rank's rows, in their order. Collective."""
        rank = self._dispatcher.links.rank
        rows = rows.detach().contiguous()
        if rows.dtype not in DTYPES:
            raise UserError(
                f"--layout experts: the tokens of {self._places.name(self.mixture)} are of "
                f"{rows.dtype}; give it float64, float32, bfloat16 or float16"
            )
        self._like = rows[:0]
        self._dispatcher.catch_up()
        header = CallHeader(
            number=self.number,
            mixture=self.mixture,
            needs_gradient=int(self._needs_gradient),
            dtype=DTYPES.index(rows.dtype),
            counts=self._counts,
            wanted=self._wanted,
        )
        headers = Headers(
            self._dispatcher.links, self._places, header, self._check, self._cut_to_here
        )
        blocks = rows.split(self._rows_to)
        dispatches = self._dispatch(blocks, is_backward=False)
        incoming = RowsAsTheyArrive(dispatches, headers)

        def compute(peer: int, chunk: int, arrived: torch.Tensor) -> torch.Tensor:
            if peer == rank:
                counts = self._of_rank(self._counts, rank)
            else:
                counts = headers.chunks_of(peer)[chunk]
            return self._compute(peer, chunk, arrived, counts)

        replies = self._dispatcher.run(incoming, blocks[rank], compute)
        wanted_by_peer = [headers.header_of(peer).wanted for peer in self._dispatcher.links.others]
        self.by_expert = [
            sum(of_ranks) for of_ranks in zip(self._wanted, *wanted_by_peer, strict=True)
        ]
        return torch.cat(replies)

    def backward(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of this rank's rows from that of their outputs. Collective.

        `gradient` is None, and counts as zero, if no loss of this rank depends on the outputs, or
        if its loss does not count.
        """
        self._dispatcher.catch_up()
        if gradient is None:
            gradient = self._like.new_zeros(sum(self._rows_to), *self._like.shape[1:])
        blocks = gradient.contiguous().split(self._rows_to)
        dispatches = self._dispatch(blocks, is_backward=True)
        for dispatch in dispatches:
            dispatch.expect({peer: self._lengths_from(peer) for peer in dispatch.peers})
        own_block = blocks[self._dispatcher.links.rank]
        replies = self._dispatcher.run(RowsInOrder(dispatches), own_block, self._backpropagate)
        return torch.cat(replies)

    def _check(self, peer: int, header: CallHeader) -> None:
        """Check that another rank computes this call in the same way.

        Raises:
            UserError: it does not.
        """
        name = self._places.name(self.mixture)
        rank, other = self._dispatcher.links.world_ranks_with(peer)
        if bool(header.needs_gradient) != self._needs_gradient:
            raise UserError(
                f"--layout experts: {name} is computed with gradients on one of ranks {rank} and "
                f"{other}, and without on the other; use torch.no_grad() on all ranks or on none"
            )
        if DTYPES[header.dtype] != self._like.dtype:
            raise UserError(
                f"--layout experts: the tokens of {name} have different dtypes on ranks {rank} and "
                f"{other}; use the same precision"
            )

    def _cut_to_here(self, counts: Sequence[int]) -> list[list[int]]:
        """Return the rows by expert of each chunk that another rank sends here, by its counts."""
        return cut(self._of_rank(counts, self._dispatcher.links.rank), self._chunks)

    def _dispatch(self, blocks: Sequence[torch.Tensor], is_backward: bool) -> list[Dispatch]:
        """Begin to send each block of rows to its rank; return the dispatches."""

        def pieces(peer: int) -> list[torch.Tensor]:
            chunks = cut(self._of_rank(self._counts, peer), self._chunks)
            return list(blocks[peer].split([*map(sum, chunks)]))

        return self._dispatcher.links.dispatch(Tags.of_call(self.number, is_backward), pieces)

    def _lengths_from(self, peer: int) -> list[int]:
        """Return how many rows a rank sent in each chunk of the forward."""
        chunks = [self._tape.get((peer, chunk)) for chunk in range(self._chunks)]
        return [0 if chunk is None else len(chunk[0]) for chunk in chunks]

    def _compute(
        self, peer: int, chunk: int, rows: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        """Return the outputs of this rank's experts for rows that a rank sent."""
        if not len(rows):
            return rows
        # An activation checkpoint around the mixture would compute it again, with all ranks, for
        # each backward of a chunk here, of which ranks have unlike numbers.
        keep_saved = torch.autograd.graph.saved_tensors_hooks(_same, _same)
        with keep_saved, torch.set_grad_enabled(self._needs_gradient):
            leaf = rows.detach().requires_grad_(self._needs_gradient)
            output = self._experts.compute(leaf, counts, self._held)
        if self._needs_gradient:
            self._tape[peer, chunk] = leaf, output
        return output.detach()

    def _backpropagate(self, peer: int, chunk: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of rows that a rank sent, from that of their outputs."""
        if not len(gradient):
            return gradient
        leaf, output = self._tape.pop((peer, chunk))
        torch.autograd.backward([output], [gradient])
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def cut(counts: Sequence[int], pieces: int) -> list[list[int]]:
    """Cut rows that are sorted by expert into pieces of lengths that differ by one row at most.

    Returns each piece's rows by expert; `counts` are the rows of each expert.
    """
    total = sum(counts)
    bounds = pairwise(total * piece // pieces for piece in range(pieces + 1))
    ends = [*pairwise([0, *accumulate(counts)])]
    return [
        [max(0, min(end, high) - max(begin, low)) for begin, end in ends] for low, high in bounds
    ]
