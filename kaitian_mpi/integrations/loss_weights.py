"""The weight of a rank's loss: how the loss depends on rows, agreed between the ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.integrations.losses import (
    MEAN,
    SUM,
    UNKNOWN,
    USUAL,
    Labels,
    Rule,
    agreed_rules,
    can_decide,
    count_labels,
    left_open,
)
from kaitian_mpi.integrations.taken_batches import BatchRows
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.preflight.verdict import by_value, differ
from kaitian_mpi.runtime.polling import wait_request

if TYPE_CHECKING:
    from mpi4py import MPI

_MAX_COMPARED = 8
"""In how many batches a loss is compared whose rules are too near to tell, as in half precision."""


class Ranks(NamedTuple):
    """The ranks, as a loss needs them."""

    world: World
    comm: MPI.Intracomm
    waiting: Callable[[], AbstractContextManager[None]]
    """Returns the context of a wait for other ranks in a backward."""

    def sum(self, number: int) -> int:
        """Return the sum of the ranks' numbers. Collective."""
        return sum(self.gather_numbers(number))

    def gather_numbers(self, number: int) -> list[int]:
        """Return every rank's number, without their time for a wait. Collective."""
        numbers = np.empty(self.comm.size, dtype=np.int64)
        with self.waiting():
            wait_request(self.comm.Iallgather(np.array([number], dtype=np.int64), numbers))
        return [int(rank_number) for rank_number in numbers]

    def gather_at(self, point: str, value: Any) -> list[Any]:
        """Return every rank's value, which JSON can hold, at a point of the step. Collective.

        Raises:
            UserError: the ranks are at different points, as they do not compute the same steps.
        """
        gathered = gather_values(self.comm, (point, value))
        names = {rank: name for rank, (name, _) in enumerate(gathered)}
        if differ(names):
            raise UserError(
                f"--adaptive finds the ranks at different points: {by_value(names)}; compute the "
                "same forwards and backwards on every rank"
            )
        return [rank_value for _, rank_value in gathered]


class Loss:
    """A loss's known dependence on its rows, which gives the weight of each rank's part.

    If all rows of a batch have equally many labels, a mean over rows equals one over labels. Then
    both remain possible, until a batch in which they differ.
    """

    def __init__(
        self,
        ranks: Ranks,
        owner: str = "",
        rules: Sequence[Rule] = (),
        fallback: Sequence[Rule] = (),
    ) -> None:
        """Start without knowledge of the loss that `owner` returns, or with assumed `rules`.

        If the first batch decides nothing on any rank, the `fallback` is assumed, if there is one.
        """
        self._fallback = list(fallback)
        self.rules = list(rules)
        """The rules that may hold, the likeliest first; none if nothing is known."""
        self.counts_stand_ins = False
        """Whether it is divided by the labels of all ranks, those of stand-in rows included."""
        self._ranks = ranks
        self._owner = owner
        self._votes: list[Rule] = []  # rules that fit this rank's rows since the ranks agreed
        self._still_open: list[Rule] = []  # of these, the rules by which other entries count
        self._is_open = False  # whether one of those remains beside the likeliest
        self._compared = 0
        self._last_message = ""

    def set_counts_stand_ins(self, counts: bool) -> None:
        """Set whether the loss is divided by the labels of all ranks, those of stand-ins too."""
        self.counts_stand_ins = counts

    def observe(
        self, labels: Labels, compare: Callable[[], list[Rule]], together: bool = False
    ) -> None:
        """Find out by `compare` how the loss depends on this rank's rows, if that is still open.

        Args:
            labels: of these rows.
            compare: returns the rules that fit them.
            together: whether all ranks call this, and `compare` if one does, as it is collective.
        """
        if self._votes or len(self.rules) == 1 or self._compared == _MAX_COMPARED:
            return
        may_decide = not self.rules or can_decide(self.rules, labels)
        if together:
            may_decide = bool(self._ranks.sum(may_decide))
        if may_decide:
            self._votes = compare()
            self._still_open = left_open(self._votes, labels)
            self._compared += 1

    def weight(self, rows: BatchRows, labels: Labels) -> float:
        """Return the factor of this rank's gradient of a batch in DDP's average.

        Collective, unless the loss is known to be a sum or mean over rows.

        Raises:
            AgreedError: the loss is neither a sum nor a mean.
        """
        if len(self.rules) != 1:
            if self._ranks.sum(bool(self._votes)):
                self._agree()
            elif self._fallback:
                self.rules = self._fallback
                self._owner = ""
        rule = self.rule
        self._report(rule)
        if rule == MEAN:
            return rows.this_rank * self._ranks.comm.size / rows.all_ranks
        if rule == SUM:
            # A trainer that counts the labels also counts those of a stand-in row.
            return float(rows.this_rank > 0 or self.counts_stand_ins)
        count = count_labels(labels, rule) if rows.this_rank else 0
        return count * self._ranks.comm.size / max(self._ranks.sum(count), 1)

    @property
    def rule(self) -> Rule:
        """Return the likeliest rule, by which the loss is weighted."""
        return self.rules[0] if self.rules else MEAN

    def _agree(self) -> None:
        """Keep the rules that fit the rows of the most ranks. Collective."""
        rank_votes = self._votes, self._still_open
        gathered = self._ranks.gather_at("a backward of a new loss", rank_votes)
        votes = [[Rule(*rule) for rule in rules] for rules, _ in gathered]
        self._votes = []
        self._still_open = []
        self.rules = agreed_rules(votes, self.rules)
        still_open = {Rule(*rule) for _, rules in gathered for rule in rules}
        self._is_open = not still_open.isdisjoint(self.rules[1:])
        if UNKNOWN in self.rules:
            raise AgreedError(
                f"--adaptive cannot weight the ranks' gradients: the loss that the {self._owner} "
                f"returns is {UNKNOWN.text}, as one with terms between rows is; leave out "
                "--adaptive"
            )

    def _report(self, rule: Rule) -> None:
        # Unusual rules remain possible until an entry occurs that excludes them.
        usual = [other for other in self.rules if other in USUAL]
        is_known = self.rules == [rule] or (usual == [rule] and not self._is_open)
        is_known &= bool(self._owner)
        owner = f" of the {self._owner}" if self._owner else ""
        text = f"adaptive: the loss{owner} is {'' if is_known else 'taken as '}{rule.text}"
        if text != self._last_message:
            self._last_message = text
            print_rank_0(self._ranks.world, text)


class Forward:
    """A forward of a model in DDP, and the rows of its batch."""

    def __init__(self, take: Callable[[], tuple[BatchRows, int]], input_length: int) -> None:
        """Call `take` once, when the batch is needed.

        Args:
            take: returns the batch's rows, and the length of the inputs for each of its rows, or 0
                if that varies.
            input_length: the length of the model's inputs.
        """
        self._take = take
        self._input_length = input_length
        self._batch: tuple[BatchRows, int] | None = None

    def batch(self) -> tuple[BatchRows, int]:
        """Return the batch's rows, and the inputs' length for each; first called by `take`."""
        if self._batch is None:
            self._batch = self._take()
        return self._batch

    def check_rows(self) -> None:
        """Raise a UserError if the model's inputs are not all rows of the loader's batch."""
        rows, ratio = self.batch()
        in_batch = max(rows.this_rank, 1)
        if ratio and self._input_length != ratio * in_batch and self._input_length % in_batch:
            raise UserError(
                f"--adaptive has given this rank a batch of {in_batch} rows, but the model was "
                f"trained on {self._input_length}; train on each batch as the loader gives it"
            )


class Backwards(NamedTuple):
    """What is called as a backward goes on."""

    begun: Callable[[], None]
    """For each output with a gradient, before that leaves for the model."""
    done: Callable[[], None]
    """When all gradients are computed, before DDP waits for other ranks."""


class ForwardWeight:
    """The factor of a loss's gradient on its way into a forward."""

    def __init__(self, forward: Forward, loss: Loss, labels: Labels, backwards: Backwards) -> None:
        """Weight by the rows of `forward`, or by its `labels`, as the loss demands."""
        self.backward_begun = backwards.begun
        """Called in a backward before the factor is used."""
        self.backward_done = backwards.done
        """Called when all gradients are computed, before DDP waits for other ranks."""
        self._forward = forward
        self._loss = loss
        self._labels = labels

    @functools.cached_property
    def factor(self) -> float:
        """Return the factor, in a backward. Collective where the ranks count labels."""
        factor = self._loss.weight(self._forward.batch()[0], self._labels)
        if self._loss.rule == MEAN:
            self._forward.check_rows()
        return factor
