"""The ranks that train and those that stand by, and how they go on when one is lost.

Work is done in pieces, each of which ends with `Crew.commit`: either every rank has done the piece,
or none has. So after a loss all that live stand at the same point and do the same piece again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from kaitian_mpi.backend.startup import close_process_group, go_on_with
from kaitian_mpi.elastic.roles import Roles, plan_recovery, plan_roles
from kaitian_mpi.errors import CollectiveError, UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World, survivors_of
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.polling import WakeUp, wait_until, wake_up

Result = TypeVar("Result")

_LOOKING_SEC = 0.05
_NOTICING_SEC = 0.5
_MOST_FALSE_ALARMS = 3  # in a row


class NotCommittedError(CollectiveError):
    """A piece of work that did not come about on every rank; all ranks that live raise it."""


@dataclass
class Loss:
    """Ranks that died at about the same time."""

    lost: list[RankInfo]
    noticed_at: float
    """Seconds since 1970."""
    noticed: float
    """The same by `time.perf_counter`."""
    step: int | None = None
    """The step that was begun or done again after it; None until training goes on."""
    is_told: bool = False
    recovery_sec: float | None = None
    """From the notice until the interrupted piece of work was done; None until it is."""


class Crew:
    """All ranks of the job that live.

    Where the job was not started so that it can live on (`mpirun --with-ft ulfm`), a loss ends it,
    and `commit` costs nothing.
    """

    def __init__(self, whole: World) -> None:
        """Begin with all ranks at work, which have a default process group."""
        self.whole = whole
        """All ranks that live."""
        self.world: World | None = whole
        """Those that train; None on a rank that stands by."""
        self.losses: list[Loss] = []
        """What has been survived."""
        self._roles = Roles()
        self._has_finished = False
        self._false_alarms = 0

    @property
    def survives(self) -> bool:
        """Whether the job lives on when a rank dies."""
        return ulfm.is_on()

    @property
    def has_reformed(self) -> bool:
        """Whether those that train are others than all ranks that started."""
        return bool(self.losses) or self._roles != Roles()

    def attempt(self, work: Callable[[World], Result]) -> Result | None:
        """Do a piece of work on the ranks that train; do it again after a loss. Collective.

        Args:
            work: collective over the ranks it is given, the ones that train. After a loss it is
                called again, on fewer ranks or others; what it has committed is done for good.

        Returns:
            What the work returns; None on a rank that stood by until the others were done.
        """
        while True:
            noticed: Exception
            try:
                if self.world is None:
                    if self._stand_by():
                        return None
                    raise NotCommittedError("those that train have called")
                result = work(self.world)
                self.commit()
                return result
            except NotCommittedError as error:
                noticed = error
            except Exception as error:
                if not self._may_be_loss(error, self.world or self.whole):
                    raise
                noticed = error
                ulfm.revoke_all()
                if self.world is not None:
                    ulfm.agree(self.world.comm, False)
            self._regroup(noticed)
            if self._has_finished:
                return None

    def commit(self, well: bool = True) -> None:
        """End a piece of work. Collective over the ranks that train.

        Args:
            well: whether this rank has done it.

        Raises:
            NotCommittedError: some rank has not, or is lost; on every rank.
        """
        if not self.survives:
            return
        assert self.world is not None
        if not ulfm.agree(self.world.comm, well):
            ulfm.revoke_all()
            raise NotCommittedError("a rank is lost")
        self._false_alarms = 0
        for loss in reversed(self.losses):
            if loss.recovery_sec is not None:
                break
            loss.recovery_sec = time.perf_counter() - loss.noticed

    def set_aside(self, spares: int, left_out: Collection[int]) -> None:
        """Let some ranks stand by from now on. Collective over all ranks.

        Args:
            spares: how many of the last.
            left_out: positions in `whole` of those that the job is faster without.
        """
        roles = plan_roles(self.whole.infos, spares, left_out)
        if roles == Roles():
            return
        self._roles = roles
        try:
            self.world = go_on_with(self.whole, roles.working(self.whole.infos))
            well, noticed = True, None
        except Exception as error:
            if not self._may_be_loss(error, self.whole):
                raise
            ulfm.revoke_all()
            well, noticed = False, error
        if self.survives and not ulfm.agree(self.whole.comm, well):
            self._regroup(noticed or NotCommittedError("a rank is lost"))

    def begin_step(self, step: int) -> list[RankInfo]:
        """Return who has been lost since the last step was begun; this one is the next."""
        since = [loss for loss in self.losses if loss.step is None]
        for loss in since:
            loss.step = step
        return [info for loss in since for info in loss.lost]

    def newly_recovered(self) -> list[Loss]:
        """Return, once, the losses after which the interrupted piece of work is done by now."""
        recovered = [loss for loss in self.losses if loss.recovery_sec and not loss.is_told]
        for loss in recovered:
            loss.is_told = True
        return recovered

    def share_history(self, world: World) -> None:
        """Let those who stood by know what the losses have cost. Collective over `world`."""
        own = [(loss.step, loss.recovery_sec) for loss in self.losses]
        by_loss = zip(*gather_values(world.comm, own), strict=True)
        for loss, told in zip(self.losses, by_loss, strict=True):
            loss.step = next((step for step, _ in told if step is not None), None)
            loss.recovery_sec = next((sec for _, sec in told if sec is not None), None)
            loss.is_told = loss.recovery_sec is not None

    def dismiss(self) -> None:
        """Let those that stand by leave: the work is done. Collective over all ranks."""
        if self._has_finished or self._roles == Roles():
            return
        self._has_finished = True
        if self.world is None:
            return  # it has stood by until now
        if self.survives:
            # Called as for a loss: all or none hear it, whoever dies at this moment.
            self._false_alarms = 0
            self._regroup(NotCommittedError("the work is done"))
        elif self.world.rank == 0:
            trains = self._roles.working(self.whole.infos)
            wake_up(self.whole.comm, set(range(self.whole.size)).difference(trains))

    def _may_be_loss(self, error: Exception, world: World) -> bool:
        """Return whether an error may be due to the loss of a rank of this world."""
        if not self.survives or isinstance(error, UserError):
            return False
        if ulfm.is_loss(error) or isinstance(error, CollectiveError):
            return True
        return ulfm.may_have_lost_ranks(world.comm, _NOTICING_SEC)

    def _stand_by(self) -> bool:
        """Wait until the others are done, or need this rank; return whether they are done."""
        comm = self.whole.comm
        try:
            return wait_until(WakeUp(comm).has_arrived, longest_nap_sec=_LOOKING_SEC)
        except Exception as error:
            if not self._may_be_loss(error, self.whole):
                raise
        # Somebody is lost: whoever trains calls, unless all of them are lost.
        trains = self._roles.working(self.whole.infos)

        def is_over() -> bool:
            ulfm.make_progress()
            return comm.Is_revoked() or ulfm.are_lost(comm, trains)

        wait_until(is_over, longest_nap_sec=_LOOKING_SEC)
        return False

    def _regroup(self, noticed_as: Exception) -> None:
        """Go on with those that live. Collective over them.

        Raises:
            Exception: `noticed_as`, if nobody is lost, and it is no error that MPI may give by
                itself, late, after a loss.
        """
        at, noticed = time.time(), time.perf_counter()
        whole = self.whole
        while True:
            ulfm.revoke_all()
            close_process_group()
            whole = survivors_of(whole)
            lost = [info for info in self.whole.infos if info not in whole.infos]
            if not lost:
                self._false_alarms += 1
                may_pass = isinstance(noticed_as, NotCommittedError) or ulfm.is_loss(noticed_as)
                if not may_pass or self._false_alarms > _MOST_FALSE_ALARMS:
                    raise noticed_as
            roles = plan_recovery(self._roles, whole.infos, lost)
            world, finished, well = None, False, True
            try:
                finished = any(gather_values(whole.comm, self._has_finished))
                if not finished:
                    world = go_on_with(whole, roles.working(whole.infos))
            except Exception as error:
                if not self._may_be_loss(error, whole):
                    raise
                well = False
                ulfm.revoke_all()
            if ulfm.agree(whole.comm, well):
                break
        self.whole, self.world, self._roles = whole, world, roles
        self._has_finished = finished
        if lost:
            self.losses.append(Loss(lost, at, noticed))
