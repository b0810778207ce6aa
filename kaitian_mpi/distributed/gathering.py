"""Gathers sharded parameters, in an order of collectives that all ranks share.

In training, each round of forward and backward uses the parameters in the same order. In the first
round the ranks compare and record it, so later rounds can prefetch the next parameter while they
compute. In evaluations the ranks compute independently, and tell each other which parameters they
need.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kaitian_mpi.balance.ownership import NO_MIRROR, Part
from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.collectives.staging import keep_for_current_stream
from kaitian_mpi.distributed.collectives.torch_releases import all_gather_into
from kaitian_mpi.distributed.gradients import uses_library
from kaitian_mpi.distributed.sharded_model import ShardedModel
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.runtime.polling import WaitContext

# These stand where the number of a parameter may stand.
BUCKET = -1  # the next bucket of gradients
_DONE = -2  # this rank needs no more parameters
_WAITED_FOR = "the parameters"
_OTHER_ORDER = (
    "sharded parameters must be used in the same order in each step on each rank, but {}; remove "
    "what depends on the data (such as skipped layers), or use devices on which the model fits "
    "whole"
)


class _Prefetch(NamedTuple):
    """A parameter that is being gathered."""

    work: Any
    values: torch.Tensor
    stream: Any
    """The stream that was current when it started; None without streams."""


class Gathering:
    """Gathers parameters' values from their owners. Collective, unless stated otherwise."""

    def __init__(
        self,
        model: ShardedModel,
        parts: Sequence[Part],
        targets: Mapping[Part, torch.Tensor],
        exchange: Callable[[Any], list[Any]],
        group: dist.ProcessGroup | None = None,
        waits: WaitContext = lambda name: nullcontext(),
        prefetches: bool = False,
    ) -> None:
        """Not collective.

        Args:
            model: whose sharded parameters are gathered.
            parts: the parts of all parameters, on all ranks.
            targets: the values of this rank's parts.
            exchange: takes this rank's value, and returns a list of all ranks' values. Collective.
            group: the ranks; None: all.
            waits: makes the context in which values are waited for.
            prefetches: whether to gather a round's next parameter while this one is used, which
                takes memory for one more; the same on every rank.
        """
        self.numbers = model.numbers
        self._model = model
        self._targets = targets
        self._exchange = exchange
        self._group = group
        self._waits = waits
        self._parts_of: dict[int, list[Part]] = {}
        for part in sorted(parts):
            if part.parameter in model.numbers:
                self._parts_of.setdefault(part.parameter, []).append(part)
        self._rows: dict[int, list[tuple[int, int]]] = {}  # by number, as `_rows_by_rank` returns
        self._order: list[int] | None = None
        self._recorded: list[int] = []
        self._place = 0  # in the order
        self._prefetches = prefetches
        self._prefetched: deque[_Prefetch] = deque()  # at most one: the next parameter

    def unshard(self, number: int) -> torch.Tensor:
        """Return the values of the parameter that the current round uses next.

        Raises:
            UserError: the first round used another one at this place.
            AgreedError: the ranks use different ones.
        """
        self._follow(number)
        return self._gather_next(number)

    @torch.no_grad()
    def write_back(self, number: int, values: torch.Tensor) -> None:
        """Store this rank's rows of values that a forward may have changed. Not collective.

        Every rank has computed the same change.

        Raises:
            UserError: they have changed, and have a mirror, which may have computed less often.
        """
        for part in self._parts_of[number]:
            target = self._targets.get(part)
            rows = values[part.begin : part.end]
            if target is None or torch.equal(target, rows):
                continue
            if part.mirror != NO_MIRROR:
                raise UserError(
                    f"{self._model.name(number)} was changed by a forward, but it is sharded with "
                    "mirrors, which may have computed less often; use --no-mirrors, or let only "
                    "the optimizer change it"
                )
            target.copy_(rows)
            device_of(target.device).mark().wait()  # another stream may be the next to read it

    def next_bucket(self) -> None:
        """Check that every rank sums a bucket of gradients next."""
        self._follow(BUCKET)

    def complete(self, sum_bucket: Callable[[], None]) -> None:
        """Join the collectives that other ranks still need in this round."""
        while (number := self._follow(None)) is not None:
            if number == BUCKET:
                sum_bucket()
            else:
                self._gather_next(number)

    def end_round(self) -> None:
        """End a round that all ranks have completed. Not collective."""
        if self._order is None:
            self._order = self._recorded
        self._place = 0

    def reset(self) -> None:
        """Forget a round that was not completed. Not collective."""
        self._recorded = []
        self._place = 0
        self._prefetched.clear()  # what is under way keeps its memory

    def unshard_any(self, number: int) -> torch.Tensor:
        """Return a parameter's values, in an evaluation.

        Every other rank calls this as well, for any parameter, or `join_others`.
        """
        values: torch.Tensor | None = None
        for needed in self._needed_numbers(number):
            gathered = self._gather(needed)
            if needed == number:
                values = gathered
        assert values is not None
        return values

    def join_others(self) -> None:
        """Join the gathers that other ranks still need, until all ranks call this."""
        while numbers := self._needed_numbers(_DONE):
            for number in numbers:
                self._gather(number)

    def _needed_numbers(self, number: int) -> list[int]:
        """Return the parameters that some rank needs now, if this one needs `number`."""
        return sorted(set(self._exchange(number)) - {_DONE})

    def _follow(self, number: int | None) -> int | None:
        """Return the parameter, or `BUCKET`, that comes next in a round; None at its end.

        Args:
            number: what this rank uses next; None if it has completed the round.

        Raises:
            UserError: the first round used another one at this place.
            AgreedError: the ranks use different ones.
        """
        if self._order is None:
            used = set(self._exchange(number)) - {None}
            if len(used) > 1:
                names = " and ".join(sorted(map(self._name, used)))
                raise AgreedError(_OTHER_ORDER.format(f"ranks use {names} at the same time"))
            if not used:
                return None
            (agreed,) = used
            self._recorded.append(agreed)
            return agreed
        expected = self._order[self._place] if self._place < len(self._order) else None
        if number is not None and number != expected:
            name = "nothing" if expected is None else self._name(expected)
            text = f"this step has used {self._name(number)} where the first has used {name}"
            raise UserError(_OTHER_ORDER.format(text))
        if expected is not None:
            self._place += 1
        return expected

    def _name(self, number: int) -> str:
        return "no more parameters" if number == BUCKET else self._model.name(number)

    def _gather_next(self, number: int) -> torch.Tensor:
        """Return a parameter's values, and start to gather the next parameter of the round.

        All ranks start it at the same place, so they start their collectives in one order. What is
        prefetched is what is used next: `_follow` refuses any other parameter.
        """
        if self._prefetched:
            values = self._wait(self._prefetched.popleft())
        else:
            values = self._gather(number)
        if self._prefetches and self._order is not None:
            upcoming = itertools.islice(self._order, self._place, None)
            following = next((other for other in upcoming if other != BUCKET), None)
            if following is not None:
                self._prefetched.append(self._start_gather(following))
        return values

    def _wait(self, prefetch: _Prefetch) -> torch.Tensor:
        with self._waits(_WAITED_FOR):
            prefetch.work.wait()
        if prefetch.stream != self._model.stream():
            keep_for_current_stream(prefetch.values)
        return prefetch.values

    def _start_gather(self, number: int) -> _Prefetch:
        values, gather = self._prepare_gather(number)
        return _Prefetch(gather(async_op=True), values, self._model.stream())

    def _gather(self, number: int) -> torch.Tensor:
        values, gather = self._prepare_gather(number)
        with self._waits(_WAITED_FOR):
            gather()
        return values

    @torch.no_grad()
    def _prepare_gather(self, number: int) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Return memory that has this rank's rows of a parameter, and a call that gathers the rest.

        Not collective; the call is.
        """
        values = self._model.empty_values(number)
        group: Any = self._group or dist.group.WORLD
        rank = group.rank()
        for part in self._parts_of[number]:
            if part.owner == rank:
                values[part.begin : part.end] = self._targets[part]
        rows = self._rows_by_rank(number, group.size())
        pieces = [values[begin:end].view(-1) for begin, end in rows]
        lengths = {end - begin for begin, end in rows}
        if len(lengths) == 1 and rows == sorted(rows) and uses_library(group):
            # In place: given a list, a library gathers into one buffer and copies from there.
            gather = partial(all_gather_into, values.view(-1), pieces[rank], group=self._group)
        else:
            gather = partial(dist.all_gather, pieces, pieces[rank], group=self._group)
        return values, gather

    def _rows_by_rank(self, number: int, size: int) -> list[tuple[int, int]]:
        """Return each rank's rows of a parameter: the first, and the one past the last."""
        if number not in self._rows:
            rows = [(0, 0)] * size
            for owner, parts in itertools.groupby(self._parts_of[number], lambda part: part.owner):
                owner_parts = list(parts)
                rows[owner] = owner_parts[0].begin, owner_parts[-1].end
            self._rows[number] = rows
        return self._rows[number]
