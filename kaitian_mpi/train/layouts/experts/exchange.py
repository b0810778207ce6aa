"""Tokens to the ranks that hold their experts, and back, while other tokens are computed.

A rank computes its own tokens while the first of other ranks are under way, then each chunk as it
arrives, and sends its outputs at once; likewise backward (COMET, arXiv 2502.19811, overlaps the two
within a device's kernels; here they are messages of chunks).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from kaitian_mpi.distributed.experts import Experts
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.topology import are_joined_by_library
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.polling import WaitContext, wait_until
from kaitian_mpi.train.layouts.experts.call import Call
from kaitian_mpi.train.layouts.experts.routes import Trip
from kaitian_mpi.train.layouts.pipeline.peers import PeerGroups

_WAIT = "tokens of other ranks"


class TokenExchange:
    """Computes mixtures of experts of which each rank holds some.

    Every rank must compute the same mixtures in the same order, with tokens or without.
    """

    def __init__(
        self,
        world: World,
        mixtures: Mapping[str, Experts],
        owners: Sequence[Sequence[int]],
        chunks: int,
        waits: WaitContext,
        before_reply: Callable[[], None],
    ) -> None:
        """Prepare the ways between ranks. Collective.

        Args:
            world: the ranks.
            mixtures: of the model, in order, by name.
            owners: the rank of each one's experts.
            chunks: into how many parts what a rank sends to another is divided; 0: none, and all
                of it arrives before anything is computed.
            waits: the context of a wait for other ranks.
            before_reply: called when outputs are computed, before they are sent.
        """
        self.rank = world.rank
        self.size = world.size
        self.others = [rank for rank in range(world.size) if rank != world.rank]
        """All ranks but this one."""
        self.chunks = max(1, chunks)
        self.hides = chunks > 0
        """Whether rows travel while others are computed."""
        self.before_reply = before_reply
        self.peers = PeerGroups(world.rank, world.device)
        self.group, self.joined = _join_kind(world)
        self.hosted = [rank for rank in self.others if rank not in self.joined]
        """The ranks that only MPI connects with this one."""
        self.waited_sec = 0.0
        """How long this rank has waited for rows and replies so far."""
        self.travel_sec = 0.0
        """How long some were under way."""
        self._world_ranks = [info.world_rank for info in world.infos]
        self._device = world.device
        self._waits = waits
        self._names = list(mixtures)
        self._numbers = {mixture: number for number, mixture in enumerate(mixtures.values())}
        self._held = [
            [[e for e, owner in enumerate(ranks) if owner == rank] for rank in range(world.size)]
            for ranks in owners
        ]
        self._places: dict[int, torch.Tensor] = {}
        self._calls = 0
        self._open: list[Call] = []
        self._under_way: list[Trip] = []
        self._used: set[int] = set()
        self._has_tokens = True
        self._weight: float | None = None
        self._share = 1.0

    def number_of(self, experts: Experts) -> int:
        """Return the number of a mixture."""
        return self._numbers[experts]

    def name(self, mixture: int) -> str:
        """Return the name of a mixture in the model."""
        return self._names[mixture] or "the model"

    def world_rank(self, rank: int) -> int:
        """Return a rank's number in the whole job."""
        return self._world_ranks[rank]

    def held(self, mixture: int) -> list[list[int]]:
        """Return a mixture's experts by the rank that holds them."""
        return self._held[mixture]

    def order(self, experts: Experts) -> list[int]:
        """Return the experts in the order in which `compute` takes their rows: by rank."""
        return [expert for held in self._held[self._numbers[experts]] for expert in held]

    def places(self, experts: Experts) -> torch.Tensor:
        """Return each expert's place in `order`, as a tensor on this rank's device."""
        number = self._numbers[experts]
        if number not in self._places:
            order = torch.tensor(self.order(experts))
            self._places[number] = order.argsort().to(self._device)
        return self._places[number]

    def begin(
        self, has_tokens: bool = True, weight: float | None = None, share: float = 1.0
    ) -> None:
        """Begin a forward. Not collective.

        Args:
            has_tokens: whether what this rank computes is needed; else it only helps the others.
            weight: the factor of its loss in that of the global batch. With 0, its tokens get a
                gradient of zero, whatever is computed. None: its loss is of its own tokens.
            share: the part of the global batch that all ranks compute now.
        """
        self._has_tokens = has_tokens
        self._weight = weight
        self._share = share

    def compute(
        self, experts: Experts, rows: torch.Tensor, counts: Sequence[int], wanted: Sequence[int]
    ) -> tuple[torch.Tensor, Sequence[int], float]:
        """Return outputs as `ExpertExchange.compute` does. Collective."""
        is_ignored = self._weight == 0 or not self._has_tokens
        if self.size == 1:
            outputs, by_expert = experts.compute(rows, counts), wanted
        else:
            self.keep(())
            given = rows
            if not self._has_tokens:
                given, counts, wanted = rows[:0], [0] * len(counts), [0] * len(wanted)
            call = Call(self, experts, self._calls, counts, wanted, is_ignored)
            self._calls += 1
            needs_gradient = torch.is_grad_enabled()
            if needs_gradient:
                self._open.append(call)
            # Also if no row here has a gradient: those of other ranks, and the experts, have.
            anchor = torch.zeros((), requires_grad=needs_gradient)
            outputs = _Travel.apply(given, anchor, call)
            if not self._has_tokens:
                outputs = rows + outputs.sum()  # of nothing, but it takes part in backward
            by_expert = call.by_expert
        total = sum(wanted if self._weight is None else by_expert) / experts.top_k
        scale = 0.0 if is_ignored or not total else self._share / (total * (self._weight or 1.0))
        return outputs, by_expert, scale

    def finish_backward(self, after: int = -1) -> None:
        """Take part in the backward of calls that no loss here depends on. Collective in effect.

        Of those of a number above `after`: the other ranks' losses may depend on them.
        """
        while self._open and self._open[-1].number > after:
            self._open[-1].backward(None)

    def close_call(self, call: Call, is_used: bool) -> None:
        """Note that a call's backward begins, and whether a loss here depends on it.

        Raises:
            UserError: it was called before.
        """
        if call not in self._open:
            raise UserError(
                "--layout experts: backward() was called twice for one forward of Experts; add up "
                "the losses first"
            )
        self._open.remove(call)
        if is_used:
            self._used.add(call.mixture)

    def take_used(self) -> list[bool]:
        """Return on which mixtures a loss here has depended since this was called."""
        used = [self.size == 1 or number in self._used for number in range(len(self._held))]
        self._used.clear()
        return used

    def keep(self, trips: Sequence[Trip]) -> None:
        """Keep trips until all that was sent has arrived."""
        self._under_way = [trip for trip in (*self._under_way, *trips) if not trip.is_over()]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for other ranks, unless it is true already."""
        if condition():
            return
        with self._waits(_WAIT):
            begin = time.perf_counter()
            wait_until(condition)
            self.waited_sec += time.perf_counter() - begin

    def clock(self) -> tuple[float, float]:
        """Return the time, and how long this rank has waited so far."""
        return time.perf_counter(), self.waited_sec

    def note_travel(self, begin: float, waited: float) -> None:
        """Note that rows were under way since then."""
        self.travel_sec += time.perf_counter() - begin

    def reset(self) -> None:
        """Forget calls that are interrupted. Not collective."""
        self._open = []
        self._used.clear()
        self.begin()

    def close(self) -> None:
        """End the group of this kind. Not collective."""
        self.reset()
        self._under_way = []
        self.peers.close()
        group = self.group
        self.group = None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


class _Travel(torch.autograd.Function):
    """A call, as autograd sees it: from this rank's rows to their outputs."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, anchor: torch.Tensor, call: Call) -> torch.Tensor:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.forward(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor, None, None]:
        return ctx.call.backward(gradient), None, None


def _join_kind(world: World) -> tuple[Any, list[int]]:
    """Return the group of this rank's kind, if a library joins it, and its ranks. Collective."""
    own: tuple[Any, list[int]] = (None, [])
    for kind in sorted(set(world.kinds)):
        ranks = [rank for rank, other in enumerate(world.kinds) if other == kind]
        if len(ranks) > 1 and are_joined_by_library([world.infos[rank] for rank in ranks]):
            group = dist.new_group(ranks)
            if world.rank in ranks:
                own = group, ranks
    return own
