"""Mixtures of experts of which each rank holds some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kaitian_mpi.distributed.experts import Experts
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.polling import WaitContext
from kaitian_mpi.train.layouts.experts.call import MixtureCall
from kaitian_mpi.train.layouts.experts.dispatch import DispatchLinks
from kaitian_mpi.train.layouts.experts.dispatcher import Dispatcher
from kaitian_mpi.train.layouts.experts.headers import CallHeader, Headers
from kaitian_mpi.train.layouts.experts.places import ExpertPlaces
from kaitian_mpi.train.layouts.experts.recomputation import Recomputation

_calls = 0
"""The calls of this process so far, in all exchanges. A number is never used again, so that rows
which an error has left under way are not taken for those of another call."""


class TokenExchange:
    """Computes mixtures of experts with other ranks, and differentiates them.

    Every rank must compute the same mixtures in the same order, with tokens or without. Backward
    goes through them in the opposite order, as autograd does on every rank.
    """

    def __init__(
        self,
        world: World,
        mixtures: Mapping[str, Experts],
        owners: Sequence[Sequence[int]],
        chunks: int,
        waits: WaitContext,
        catch_up: Callable[[], None],
    ) -> None:
        """Connect the ranks, and let the mixtures use them. Collective.

        Args:
            world: the ranks.
            mixtures: of the model, in order, by name.
            owners: the rank of each one's experts.
            chunks: see `Dispatcher.set_chunks`.
            waits: the context of a wait for other ranks.
            catch_up: called when something is computed, before it is sent.
        """
        mark = world.device_kind.mark
        self.dispatcher = Dispatcher(DispatchLinks(world), chunks, waits, catch_up, mark)
        """Sends the rows to the ranks of their experts."""
        self._places = ExpertPlaces(mixtures, owners, world.size, world.device)
        self._is_alone = world.size == 1
        self._number = max(gather_values(world.comm, _calls))
        """Of the next call; the same on every rank."""
        self._open: list[MixtureCall] = []
        """Calls without a backward as yet."""
        self._recomputation = Recomputation()
        self._ending: Headers | None = None
        """The headers with which the ranks end their last forwards."""
        self._used: set[int] = set()
        """The mixtures that a loss of this rank has depended on."""
        self._has_tokens = True
        self._weight: float | None = None
        self._share = 1.0
        for mixture in self._places.mixtures:
            mixture.use_exchange(self)

    def order(self, experts: Experts) -> list[int]:
        """Return a mixture's experts in the order in which `compute` takes their rows."""
        return self._places.order(experts)

    def places(self, experts: Experts) -> torch.Tensor:
        """Return each expert's place in `order`, as a tensor on this rank's device."""
        return self._places.places(experts)

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
        self._recomputation.reset()  # what a script has computed before has no backward any more
        self._has_tokens = has_tokens
        self._weight = weight
        self._share = share

    def compute(
        self, experts: Experts, rows: torch.Tensor, counts: Sequence[int], wanted: Sequence[int]
    ) -> tuple[torch.Tensor, Sequence[int], float]:
        """Return outputs as `ExpertExchange.compute` does. Collective.

        Raises:
            UserError: another rank does not compute the same mixture now.
        """
        if self._is_alone:
            outputs = experts.compute(rows, counts)
            by_expert = wanted
        else:
            outputs, by_expert = self._compute_with_others(experts, rows, counts, wanted)
        total = sum(wanted if self._weight is None else by_expert) / experts.top_k
        counts_here = total > 0 and self._weight != 0 and self._has_tokens
        scale = self._share / (total * (self._weight or 1.0)) if counts_here else 0.0
        return outputs, by_expert, scale

    def _compute_with_others(
        self, experts: Experts, rows: torch.Tensor, counts: Sequence[int], wanted: Sequence[int]
    ) -> tuple[torch.Tensor, Sequence[int]]:
        sent = rows
        if not self._has_tokens:
            sent = rows[:0]
            counts = [0] * len(counts)
            wanted = [0] * len(wanted)
        call = MixtureCall(
            self.dispatcher, self._places, experts, self._next_number(), counts, wanted
        )
        needs_gradient = torch.is_grad_enabled()
        if needs_gradient:
            self._open.append(call)
            self._recomputation.called(call.number, call.mixture)
        # Also if no row here has a gradient: those of other ranks, and the experts, have.
        anchor = torch.zeros((), requires_grad=needs_gradient)
        outputs = _Differentiable.apply(sent, anchor, call, self._backward, self._weight == 0)
        if not self._has_tokens:
            outputs = rows + outputs.sum()  # of nothing, but it takes part in backward
        return outputs, call.by_expert

    def _next_number(self) -> int:
        global _calls
        number = self._number
        self._number = _calls = number + 1
        return number

    def finish_forwards(self) -> None:
        """Tell the others that this rank computes no mixture for now. Collective; nobody waits.

        Raises:
            UserError: another rank computed one more, or one less, before its last call of this.
        """
        if self._is_alone:
            return
        if self._ending is not None:
            self._ending.check_arrived()
        header = CallHeader.of_end(self._next_number())
        self._ending = Headers(self.dispatcher.links, self._places, header)

    def finish_backward(self, after: int = -1) -> None:
        """Join the backward of the calls that no loss here depends on. Collective in effect.

        The other ranks' losses may depend on them. Only calls with a number above `after`.

        Raises:
            UserError: the other ranks may compute one of them again, in an activation checkpoint.
        """
        while self._open and self._open[-1].number > after:
            call = self._open.pop()
            self._recomputation.check(call.number, self._places.name(call.mixture))
            call.backward(None)

    def _backward(
        self, call: MixtureCall, gradient: torch.Tensor | None, is_ignored: bool
    ) -> torch.Tensor:
        """Return the gradient of a call's rows. Collective.

        Raises:
            UserError: it was called before.
        """
        self.finish_backward(after=call.number)  # autograd takes later calls first, if at all
        if call not in self._open:
            raise UserError(
                "--layout experts: backward() was called twice for one forward of Experts; add up "
                "the losses first"
            )
        self._open.remove(call)
        if gradient is not None:
            self._used.add(call.mixture)
        return call.backward(None if is_ignored else gradient)

    def take_used(self) -> list[bool]:
        """Return for each mixture if a loss of this rank depended on it since the last call.

        True for all on one rank: there, autograd needs no help from this object.
        """
        count = len(self._places.mixtures)
        used = [self._is_alone or number in self._used for number in range(count)]
        self._used.clear()
        return used

    def reset(self) -> None:
        """Forget calls that are interrupted. Not collective."""
        self._open = []
        self._ending = None
        self._used.clear()
        self.begin()

    def close(self) -> None:
        """Let the mixtures be computed by each rank alone again. Not collective."""
        self.reset()
        for mixture in self._places.mixtures:
            mixture.use_exchange(None)
        self.dispatcher.close()


Backward = Callable[[MixtureCall, torch.Tensor | None, bool], torch.Tensor]


class _Differentiable(torch.autograd.Function):
    """A call, as autograd sees it: from this rank's rows to their outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        anchor: torch.Tensor,
        call: MixtureCall,
        backward: Backward,
        is_ignored: bool,
    ) -> torch.Tensor:
        ctx.call = call
        ctx.run_backward = backward
        ctx.is_ignored = is_ignored
        ctx.set_materialize_grads(False)
        return call.forward(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return ctx.run_backward(ctx.call, gradient, ctx.is_ignored), None, None, None, None
