"""Gathers sharded parameters, in an order of collectives that all ranks share.

In training, each round of forward and backward uses the parameters in the same order. In the first
round the ranks compare and record it, so later rounds can gather several parameters together, and
prefetch the next ones while they compute. In evaluations the ranks compute independently, and tell
each other which parameters they need.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from kaitian_mpi.balance.ownership import NO_MIRROR, Part, cut_into_runs
from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.collectives.staging import keep_for_current_stream
from kaitian_mpi.distributed.collectives.torch_releases import all_gather_into
from kaitian_mpi.distributed.gradients import gather_together, uses_library
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


class GatheredRun:
    """Parameters that a round uses one after the other, and that are gathered together.

    Attributes:
        values: of the parameters, by number, until the run's last use of each.
        versions: of these values, by number.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        values: dict[int, torch.Tensor],
        versions: dict[int, Any],
        works: Sequence[Any],
        stream: Any,
    ) -> None:
        """Note a gather that has been started.

        Args:
            numbers: of the parameters, in the order of their uses, some more than once.
            values: receive what is gathered.
            versions: what `Gathering.version` returns of each parameter.
            works: to be waited for, before values are used.
            stream: that was current when it started; None without streams.
        """
        self.values = values
        self.versions = versions
        self._uses = deque(numbers)
        self._works = works
        self._stream = stream

    def wait(self) -> None:
        """Wait until the values are here, or let the current stream wait for them."""
        for work in self._works:
            work.wait()

    def take(self, number: int, stream: Any) -> torch.Tensor:
        """Return the values of the run's next parameter, for the current stream."""
        expected = self._uses.popleft()
        assert number == expected
        values = self.values[number]
        if number not in self._uses:
            del self.values[number]
        if stream != self._stream:
            keep_for_current_stream(values)
        return values


class ParameterGathers:
    """Starts gathers of parameters, and takes back what a forward has changed in their values."""

    def __init__(
        self,
        model: ShardedModel,
        parts: Sequence[Part],
        targets: Mapping[Part, torch.Tensor],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Not collective.

        Args:
            model: whose sharded parameters are gathered.
            parts: the parts of all parameters, on all ranks.
            targets: the values of this rank's parts.
            group: the ranks; None: all.
        """
        self._model = model
        self._targets = targets
        self._group = group
        self._parts_of: dict[int, list[Part]] = {}
        for part in sorted(parts):
            if part.parameter in model.numbers:
                self._parts_of.setdefault(part.parameter, []).append(part)
        self._rows: dict[int, list[tuple[int, int]]] = {}  # by number, as `_rows_by_rank` returns

    @torch.no_grad()
    def start(
        self, numbers: Sequence[int], in_background: bool
    ) -> tuple[dict[int, torch.Tensor], list[Any]]:
        """Start to gather parameters together. Collective.

        Returns:
            Memory that receives their values, by number; and works to wait for, none if the values
            are here because this was not to be done `in_background`.
        """
        group: Any = self._group or dist.group.WORLD
        values = {number: self._model.empty_values(number) for number in numbers}
        by_library = uses_library(group)
        works = []
        pieces = []
        tensors = []
        for number in numbers:
            rows = self._rows_by_rank(number, group.size())
            by_rank = [values[number][begin:end].view(-1) for begin, end in rows]
            rank_rows = by_rank[group.rank()]
            targets = self._rank_targets(number)
            if len(targets) == 1 and not by_library:
                rank_rows = targets[0]  # which is copied to its place while it is sent
            elif targets:
                torch.cat(targets, out=rank_rows)
            if by_library and _are_equal_and_in_order(rows):
                # In place: given a list, it gathers into one buffer and copies from there.
                whole = values[number].view(-1)
                work = all_gather_into(whole, rank_rows, group=self._group, async_op=in_background)
                works.append(work)
            else:
                pieces.append(by_rank)
                tensors.append(rank_rows)
        if pieces:
            works += gather_together(pieces, tensors, self._group, in_background=in_background)
        return values, [work for work in works if work is not None]

    def gather_one(self, number: int, waits: WaitContext) -> torch.Tensor:
        """Return the values of one parameter, waiting for them in this context. Collective."""
        with waits(_WAITED_FOR):
            values, _ = self.start([number], in_background=False)
        return values[number]

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

    def _rank_targets(self, number: int) -> list[torch.Tensor]:
        """Return this rank's rows of a parameter, in order and flat."""
        group: Any = self._group or dist.group.WORLD
        owned = [part for part in self._parts_of[number] if part.owner == group.rank()]
        return [self._targets[part].detach().view(-1) for part in owned]

    def _rows_by_rank(self, number: int, size: int) -> list[tuple[int, int]]:
        """Return each rank's rows of a parameter: the first, and the one past the last."""
        if number not in self._rows:
            rows = [(0, 0)] * size
            for owner, parts in itertools.groupby(self._parts_of[number], lambda part: part.owner):
                owner_parts = list(parts)
                rows[owner] = owner_parts[0].begin, owner_parts[-1].end
            self._rows[number] = rows
        return self._rows[number]


def _are_equal_and_in_order(rows: Sequence[tuple[int, int]]) -> bool:
    """Return whether all ranks have equally many rows of a parameter, in the order of ranks."""
    return len({end - begin for begin, end in rows}) == 1 and list(rows) == sorted(rows)


class IndependentGathers:
    """Gathers parameters while each rank computes what it likes, as in an evaluation.

    Each rank tells the others which parameter it needs next, and joins what they need.
    """

    def __init__(
        self,
        gathers: ParameterGathers,
        exchange: Callable[[Any], list[Any]],
        waits: WaitContext,
    ) -> None:
        """Not collective; the arguments are as those of `Gathering`."""
        self._gathers = gathers
        self._exchange = exchange
        self._waits = waits

    def unshard(self, number: int) -> torch.Tensor:
        """Return a parameter's values.

        Every other rank calls this as well, for any parameter, or `join_others`.
        """
        values: torch.Tensor | None = None
        for needed in self._needed_numbers(number):
            gathered = self._gathers.gather_one(needed, self._waits)
            if needed == number:
                values = gathered
        assert values is not None
        return values

    def join_others(self) -> None:
        """Join the gathers that other ranks still need, until all ranks call this."""
        while numbers := self._needed_numbers(_DONE):
            for number in numbers:
                self._gathers.gather_one(number, self._waits)

    def _needed_numbers(self, number: int) -> list[int]:
        """Return the parameters that some rank needs now, if this one needs `number`."""
        return sorted(set(self._exchange(number)) - {_DONE})


class Gathering:
    """Gathers parameters' values from their owners, in the order of the rounds of training.

    Collective, unless stated otherwise.
    """

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
            prefetches: whether to gather a round's next parameters while these are used, which
                takes memory for as many more; the same on every rank.
        """
        self.numbers = model.numbers
        self.together = model.bytes_together()
        """The most bytes that are gathered together, unless a single parameter has more."""
        self._model = model
        self._gathers = ParameterGathers(model, parts, targets, group)
        self._exchange = exchange
        self.independent = IndependentGathers(self._gathers, exchange, waits)
        """For forwards outside of rounds."""
        self._waits = waits
        self._order: list[int] | None = None
        self._recorded: list[int] = []
        self._place = 0  # in the order
        self._prefetches = prefetches
        self._runs: list[list[int]] = []  # the order without buckets, in what is gathered together
        self._started = 0  # runs of this round
        # The run that is used now, and maybe the next one.
        self._under_way: deque[GatheredRun] = deque()

    def unshard(self, number: int) -> torch.Tensor:
        """Return the values of the parameter that the current round uses next.

        Raises:
            UserError: the first round used another one at this place.
            AgreedError: the ranks use different ones.
        """
        self._follow(number)
        return self._gather_next(number)

    def write_back(self, number: int, values: torch.Tensor) -> None:
        """Store this rank's rows of values that a forward may have changed. Not collective.

        Every rank has computed the same change.

        Raises:
            UserError: they have changed, and have a mirror, which may have computed less often.
        """
        self._gathers.write_back(number, values)

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
            self._agree_on(self._recorded)
        self._rewind()

    def reset(self) -> None:
        """Forget a round that was not completed. Not collective."""
        self._recorded = []
        self._rewind()

    def version(self, number: int) -> Any:
        """Return a value that differs after a script has changed a parameter within a round."""
        return None

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

    def _agree_on(self, order: list[int]) -> None:
        """Follow this order from the next round on."""
        self._order = order
        sizes = {number: self._model.nbytes(number) for number in self.numbers}
        used = [number for number in order if number != BUCKET]
        self._runs = cut_into_runs(used, sizes, self.together)

    def _rewind(self) -> None:
        """Begin a round."""
        self._place = 0
        self._started = 0
        self._under_way.clear()  # what is being gathered keeps its memory

    def _gather_next(self, number: int) -> torch.Tensor:
        """Return the values of the order's next parameter, and start to gather those after it.

        All ranks start these at the same place, so they start their collectives in one order.
        """
        if self._order is None:
            return self._gathers.gather_one(number, self._waits)
        if self._under_way and not self._under_way[0].values:
            self._under_way.popleft()  # only now, when its last parameter is no longer used
        if not self._under_way:
            self._start_run()
        if self._prefetches and len(self._under_way) == 1 and self._may_start_next():
            self._start_run()
        run = self._under_way[0]
        with self._waits(_WAITED_FOR):
            run.wait()
        return self._take(run, number)

    def _take(self, run: GatheredRun, number: int) -> torch.Tensor:
        """Return the values of the order's next parameter, of the run that it is in."""
        return run.take(number, self._model.stream())

    def _may_start_next(self) -> bool:
        """Return whether there is another run, none of whose parameters this one may yet change."""
        more = self._runs[self._started : self._started + 1]
        return any(self._under_way[0].values.keys().isdisjoint(run) for run in more)

    def _start_run(self) -> None:
        """Start to gather the next run of the round. Collective."""
        numbers = self._runs[self._started]
        self._started += 1
        versions = {number: self.version(number) for number in numbers}
        with nullcontext() if self._prefetches else self._waits(_WAITED_FOR):
            values, works = self._gathers.start([*versions], in_background=self._prefetches)
        self._under_way.append(GatheredRun(numbers, values, versions, works, self._model.stream()))
