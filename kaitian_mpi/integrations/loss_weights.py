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
    count_labels,
    left_open,
    may_tell,
)
from kaitian_mpi.integrations.taken import Given
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
        own = np.array([number], dtype=np.int64)
        total = np.empty_like(own)
        with self.waiting():
            wait_request(self.comm.Iallreduce(own, total))
        return int(total[0])

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
        return [own for _, own in gathered]


class Loss:
    """A loss's known dependence on its rows, which gives the weight of each rank's part.

    A batch whose rows have as many labels each does not tell a mean over rows from one over
    labels. Then both remain, until a batch by which they differ.
    """

    def __init__(
        self,
        ranks: Ranks,
        owner: str = "",
        rules: Sequence[Rule] = (),
        fallback: Sequence[Rule] = (),
    ) -> None:
        """Know nothing of the loss that `owner` returns, or what is taken for granted: `rules`.

        If the first batch tells nothing on any rank, the `fallback` is, if there is one.
        """
        self._fallback = list(fallback)
        self.rules = list(rules)
        """The rules that may hold, the likeliest first; none if nothing is known."""
        self.counts_stand_ins = False
        """Whether it is divided by the labels of all ranks, those of stand-in rows included."""
        self._ranks = ranks
        self._owner = owner
        self._votes: list[Rule] = []  # what this rank's rows have told since the ranks agreed
        self._still_open: list[Rule] = []  # of these, those by which other entries count
        self._is_open = False  # whether one of those is left beside the likeliest
        self._compared = 0
        self._said = ""

    def observe(
        self, labels: Labels, compare: Callable[[], list[Rule]], together: bool = False
    ) -> None:
        """Find out by `compare` how the loss depends on this rank's rows, if they may tell more.

        Args:
            labels: of these rows.
            compare: returns the rules that fit them.
            together: whether all ranks call this, and `compare` if one does, as it is collective.
        """
        if self._votes or len(self.rules) == 1 or self._compared == _MAX_COMPARED:
            return
        tells = not self.rules or may_tell(self.rules, labels)
        if together:
            tells = bool(self._ranks.sum(tells))
        if tells:
            self._votes = compare()
            self._still_open = left_open(self._votes, labels)
            self._compared += 1

    def weight(self, given: Given, labels: Labels) -> float:
        """Return what this rank's gradient of a batch is multiplied by, for DDP's average.

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
        self._say(rule)
        if rule == MEAN:
            return given.own * self._ranks.comm.size / given.all_ranks
        if rule == SUM:
            # A trainer that counts the labels counts those of a row that is there again, too.
            return float(given.own > 0 or self.counts_stand_ins)
        own = count_labels(labels, rule) if given.own else 0
        return own * self._ranks.comm.size / max(self._ranks.sum(own), 1)

    @property
    def rule(self) -> Rule:
        """Return the likeliest rule, by which the loss is weighted."""
        return self.rules[0] if self.rules else MEAN

    def _agree(self) -> None:
        """Keep the rules that fit the rows of the most ranks. Collective."""
        own = self._votes, self._still_open
        gathered = self._ranks.gather_at("a backward of a new loss", own)
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

    def _say(self, rule: Rule) -> None:
        # Other rules than the usual ones remain as long as an entry never comes.
        usual = [other for other in self.rules if other in USUAL]
        is_known = self.rules == [rule] or (usual == [rule] and not self._is_open)
        is_known &= bool(self._owner)
        owner = f" of the {self._owner}" if self._owner else ""
        text = f"adaptive: the loss{owner} is {'' if is_known else 'taken as '}{rule.text}"
        if text != self._said:
            self._said = text
            print_rank_0(self._ranks.world, text)


class Forward:
    """A forward of a model in DDP, and the batch whose rows it has."""

    def __init__(self, take: Callable[[], tuple[Given, int]], rows: int) -> None:
        """Take the batch by `take()`, once.

        Args:
            take: returns the batch, and the length that the inputs should have for each of its
                rows, or 0 if that varies.
            rows: the length of the model's inputs.
        """
        self._take = take
        self._rows = rows
        self._batch: tuple[Given, int] | None = None

    def batch(self) -> tuple[Given, int]:
        """Return the batch, and the inputs' length for each row; takes it in the first call."""
        if self._batch is None:
            self._batch = self._take()
        return self._batch

    def check_rows(self) -> None:
        """Raise a UserError if the model was not given the rows that the loader has given."""
        given, ratio = self.batch()
        in_batch = max(given.own, 1)
        if ratio and self._rows != ratio * in_batch and self._rows % in_batch:
            raise UserError(
                f"--adaptive has given this rank a batch of {in_batch} rows, and the model was "
                f"trained on {self._rows}; train on each batch as the loader gives it"
            )


class ForwardWeight:
    """What the gradient of a loss is multiplied by on its way into a forward."""

    def __init__(
        self, forward: Forward, loss: Loss, labels: Labels, backward_done: Callable[[], None]
    ) -> None:
        """Weight by the rows of `forward`, or by its `labels`, as the loss demands."""
        self.backward_done = backward_done
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
