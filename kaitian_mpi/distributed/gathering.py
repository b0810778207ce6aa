"""Gathers parameters that are in parts, in an order of collectives that all ranks share.

Training has the same order in each round of forward and backward: the first is compared between the
ranks, and recorded. So later rounds can gather the next parameter while one computes with another.
Elsewhere ranks compute what they like, and tell each other what they need.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kaitian_mpi.balance.ownership import NO_MIRROR, Part
from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.collectives.staging import keep_for_current_stream
from kaitian_mpi.distributed.collectives.torch_releases import all_gather_into
from kaitian_mpi.distributed.late_values import PartedModel
from kaitian_mpi.errors import AgreedError, UserError

_BUCKET = -1  # among the numbers of parameters: the next bucket of gradients
_DONE = -2
_WHAT = "the parameters"
_ORDER = (
    "--layout shard: parameters in parts have to be used in the same order in each step on each "
    "rank, but {}; leave out what depends on the data (such as skipped layers), or use devices on "
    "which the model fits whole"
)


class _Flight(NamedTuple):
    """A parameter that is being gathered."""

    work: Any
    values: torch.Tensor
    stream: Any
    """That was current when it started; None without streams."""


class Gathering:
    """Brings the values of parameters from their owners. Collective, unless stated otherwise."""

    def __init__(
        self,
        model: PartedModel,
        parts: Sequence[Part],
        targets: Mapping[Part, torch.Tensor],
        exchange: Callable[[Any], list[Any]],
        group: dist.ProcessGroup | None = None,
        waits: Callable[[str], AbstractContextManager[Any]] = lambda what: nullcontext(),
        is_ahead: bool = False,
    ) -> None:
        """Not collective.

        Args:
            model: whose parameters are in parts.
            parts: of all of them, by all ranks.
            targets: the values of those of this rank.
            exchange: gathers a value of each rank.
            group: of the ranks; None: all.
            waits: the context of waiting for values.
            is_ahead: whether to gather the next parameter of a round ahead, which takes memory for
                one more; the same on every rank.
        """
        self.numbers = model.numbers
        self._model = model
        self._targets = targets
        self._exchange = exchange
        self._group = group
        self._waits = waits
        self._of: dict[int, list[Part]] = {}
        for part in sorted(parts):
            if part.parameter in model.numbers:
                self._of.setdefault(part.parameter, []).append(part)
        self._order: list[int] | None = None
        self._recorded: list[int] = []
        self._place = 0
        self._is_ahead = is_ahead
        self._ahead: deque[_Flight] = deque()  # of the next parameter, if it was started

    def bring(self, number: int) -> torch.Tensor:
        """Return a parameter that the current round uses next.

        Raises:
            UserError: it is another one than before at this place.
            AgreedError: the ranks use different ones.
        """
        self._follow(number)
        return self._gather_next(number)

    @torch.no_grad()
    def keep(self, number: int, values: torch.Tensor) -> None:
        """Take this rank's rows of what a forward may have changed, as it has on each rank.

        Not collective.

        Raises:
            UserError: it has changed them, and a mirror may have computed less often.
        """
        for part in self._of[number]:
            target, rows = self._targets.get(part), values[part.begin : part.end]
            if target is None or torch.equal(target, rows):
                continue
            if part.mirror != NO_MIRROR:
                raise UserError(
                    f"--layout shard: {self._model.name(number)} was changed by a forward, while "
                    "it is in parts that have mirrors, which may have computed less often; use "
                    "--no-mirrors, or let the optimizer alone change it"
                )
            target.copy_(rows)
            device_of(target.device).mark().wait()  # another stream may be the next to read it

    def next_bucket(self) -> None:
        """Note that a bucket's gradients are summed next."""
        self._follow(_BUCKET)

    def complete(self, sum_bucket: Callable[[], None]) -> None:
        """Take part in what other ranks do in this round, of which this one has done its own."""
        while (what := self._follow(None)) is not None:
            if what == _BUCKET:
                sum_bucket()
            else:
                self._gather_next(what)

    def end_round(self) -> None:
        """End a round that all ranks have completed. Not collective."""
        if self._order is None:
            self._order = self._recorded
        self._place = 0

    def reset(self) -> None:
        """Forget a round that was not completed. Not collective."""
        self._recorded = []
        self._place = 0
        self._ahead.clear()  # what is under way keeps its memory

    def bring_any(self, number: int) -> torch.Tensor:
        """Return a parameter, while the other ranks bring any, or are at `end_any`."""
        found: torch.Tensor | None = None
        for each in sorted({*self._exchange(number)} - {_DONE}):
            values = self._gather(each)
            found = values if each == number else found
        assert found is not None
        return found

    def end_any(self) -> None:
        """Take part in what the others bring, until all are here."""
        while wanted := {*self._exchange(_DONE)} - {_DONE}:
            for each in sorted(wanted):
                self._gather(each)

    def _follow(self, what: int | None) -> int | None:
        """Return what comes next in a round; None if nothing does."""
        if self._order is None:
            known = {each for each in self._exchange(what) if each is not None}
            if len(known) > 1:
                names = " and ".join(sorted(map(self._name, known)))
                raise AgreedError(_ORDER.format(f"ranks use {names} at the same time"))
            next_ = next(iter(known), None)
            self._recorded += [] if next_ is None else [next_]
            return next_
        next_ = self._order[self._place] if self._place < len(self._order) else None
        if what is not None and what != next_:
            name = "nothing" if next_ is None else self._name(next_)
            text = f"this step has used {self._name(what)} where the first has used {name}"
            raise UserError(_ORDER.format(text))
        self._place += 1
        return next_

    def _name(self, what: int) -> str:
        return "no more parameters" if what == _BUCKET else self._model.name(what)

    def _gather_next(self, number: int) -> torch.Tensor:
        """Return the parameter at the last place of the order, and start the next one's gather.

        All ranks start it at the same place, so the order of collectives is one. It is used as the
        order says, or not at all: whatever uses another parameter first has an error in `_follow`.
        """
        values = self._arrived(self._ahead.popleft()) if self._ahead else self._gather(number)
        if self._is_ahead and self._order is not None:
            rest = itertools.islice(self._order, self._place, None)
            number = next((each for each in rest if each != _BUCKET), _DONE)
            if number != _DONE:
                self._ahead.append(self._start(number))
        return values

    def _arrived(self, flight: _Flight) -> torch.Tensor:
        with self._waits(_WHAT):
            flight.work.wait()
        if flight.stream != self._model.stream():
            keep_for_current_stream(flight.values)
        return flight.values

    def _start(self, number: int) -> _Flight:
        values, gather = self._filled(number)
        return _Flight(gather(async_op=True), values, self._model.stream())

    def _gather(self, number: int) -> torch.Tensor:
        values, gather = self._filled(number)
        with self._waits(_WHAT):
            gather()
        return values

    @torch.no_grad()
    def _filled(self, number: int) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Return memory with this rank's rows of a parameter, and what gathers the others'."""
        values = self._model.room_for(number)
        group: Any = self._group or dist.group.WORLD
        rank, pieces = group.rank(), [values[:0].view(-1)] * group.size()
        owners: list[int] = []
        for owner, parts in itertools.groupby(self._of[number], lambda part: part.owner):
            own = [*parts]
            if owner == rank:
                for part in own:
                    values[part.begin : part.end] = self._targets[part]
            pieces[owner] = values[own[0].begin : own[-1].end].view(-1)
            owners.append(owner)
        are_equal = len({piece.numel() for piece in pieces}) == 1 and owners == sorted(owners)
        if are_equal and getattr(group, "uses_library", False):
            # In place: of a list, a library makes a copy of all first.
            return values, partial(
                all_gather_into, values.view(-1), pieces[rank], group=self._group
            )
        return values, partial(dist.all_gather, pieces, pieces[rank], group=self._group)
