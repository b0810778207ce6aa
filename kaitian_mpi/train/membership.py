"""Membership: which ranks are active and which on standby, and how they regroup after a loss.

Work is divided into units, each of which ends with `Membership.commit`: either every active rank
has done the unit, or none has. So after a loss all surviving ranks are at the same point and repeat
the same unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kaitian_mpi.distributed.startup import close_process_group, open_process_group
from kaitian_mpi.errors import CollectiveError, UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World, keep_ranks, survivors_of
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.polling import WakeUp, wait_until, wake_up

_MAX_NAP_SEC = 0.05
_DETECTION_SEC = 0.5
_MAX_FALSE_ALARMS = 3  # in a row
_FAILED = b"x"  # wakes up a rank on standby if the others have ended with an error


class NotCommittedError(CollectiveError):
    """Some rank has not done the unit of work; raised on all surviving ranks."""


@dataclass
class RankLoss:
    """The loss of one rank, or of several at about the same time."""

    lost: list[RankInfo]
    noticed_at: float
    """When it was noticed, in seconds since 1970."""
    noticed: float
    """The same time by `time.perf_counter`."""
    step: int | None = None
    """The first step after it; None until training continues."""
    is_logged: bool = False
    recovery_sec: float | None = None
    """Seconds from the notice until the interrupted unit of work was done; None until then."""


@dataclass(frozen=True)
class Standby:
    """The world ranks that do not train; all others are active."""

    spares: frozenset[int] = field(default_factory=frozenset)
    """Ranks ready to replace a lost one."""
    excluded: frozenset[int] = field(default_factory=frozenset)
    """Ranks without which the job is faster."""

    def active(self, infos: Sequence[RankInfo]) -> list[int]:
        """Return the indices in `infos` of the active ranks."""
        aside = self.spares | self.excluded
        return [rank for rank, info in enumerate(infos) if info.world_rank not in aside]


def plan_standby(world: World, spares: int, excluded: Collection[int]) -> Standby:
    """Return which of the surviving ranks are on standby; at least one rank stays active.

    Each lost rank takes the place of a spare. If no other rank were active, no rank is excluded.
    """
    numbers = [info.world_rank for info in world.infos]
    left = max(0, min(spares - (world.started - world.size), world.size - 1))
    last = frozenset(numbers[world.size - left :])
    return _with_active(Standby(last, frozenset(excluded) & set(numbers)), world.infos)


def replace_lost(
    standby: Standby, alive: Sequence[RankInfo], lost: Collection[RankInfo]
) -> Standby:
    """Return which ranks are on standby after a loss.

    Each lost rank that was active is replaced by a spare: one of the same device kind and host if
    there is one, else of the same kind, else of the same host, else the first. If no rank were
    active, the excluded ones become active again.
    """
    spares = [info for info in alive if info.world_rank in standby.spares]
    aside = standby.spares | standby.excluded
    for gone in sorted(lost, key=lambda info: info.world_rank):
        if spares and gone.world_rank not in aside:
            alike = [(s.kind == gone.kind, s.host == gone.host, -s.world_rank) for s in spares]
            spares.pop(alike.index(max(alike)))
    after = Standby(
        frozenset(info.world_rank for info in spares),
        standby.excluded & {info.world_rank for info in alive},
    )
    return _with_active(after, alive)


def _with_active(standby: Standby, infos: Sequence[RankInfo]) -> Standby:
    """Return `standby`, without excluded ranks if otherwise no rank were active."""
    return standby if standby.active(infos) else Standby(spares=standby.spares)


class Membership:
    """The surviving ranks of the job, and which of them are active.

    Only this class changes the job's ranks, and the default process group with them. If the job was
    started without fault tolerance (`mpirun --with-ft ulfm`), a loss ends it, and `commit` costs
    nothing.
    """

    def __init__(self, world: World) -> None:
        """Start with all ranks active, as members of the default process group."""
        self.all_ranks = world
        self.active: World | None = world
        """The ranks that train; None on a rank on standby."""
        self.losses: list[RankLoss] = []
        self.others_failed = False
        """Whether the others ended with an error while this rank was on standby."""
        self._standby = Standby()
        self._is_released = False
        self._false_alarms = 0

    @property
    def survives(self) -> bool:
        """Whether the job survives the death of a rank."""
        return ulfm.is_enabled()

    @property
    def has_standby(self) -> bool:
        """Whether any surviving rank is, or was until the end, on standby; the same on each."""
        return self._standby != Standby()

    def attempt(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do work that is collective over all ranks; after a loss, repeat it on the survivors.

        Its last argument is the world of these ranks. Call it before any rank is on standby.
        """
        while True:
            try:
                result = work(*arguments, self.all_ranks)
                self.commit()
                return result
            except Exception as error:
                noticed = error
            self.recover(noticed)
            del noticed  # its traceback refers to this frame

    def change_world(self, change: Callable[[World], World]) -> None:
        """Replace the world of the surviving ranks by a changed one. Collective over all ranks.

        Call it before any rank is on standby.
        """
        self.all_ranks = self.active = self.attempt(change)

    def wait_until_active(self) -> World | None:
        """Return the active ranks, once this one is among them; None if they end without it.

        Raises NotCommittedError if the ranks are to `recover`.
        """
        if self.active is None and not self._is_released:
            if self._wait_on_standby():
                return None
            raise NotCommittedError("the active ranks are regrouping")
        return None if self._is_released else self.active

    def recover(self, error: Exception) -> None:
        """Continue with the surviving ranks; raises the error if no rank is lost. Collective."""
        if not isinstance(error, NotCommittedError):
            if not self.may_be_loss(error):
                raise error
            ulfm.revoke_all()
            if self.active is not None:
                ulfm.agree(self.active.comm, False)
        self._regroup(error)

    def may_be_loss(self, error: Exception, world: World | None = None) -> bool:
        """Return whether an error may be due to the loss of a rank: by default, an active one."""
        if not self.survives or isinstance(error, UserError):
            return False
        if ulfm.may_be_loss(error) or isinstance(error, CollectiveError):
            return True
        comm = (world or self.active or self.all_ranks).comm
        return ulfm.loss_detected_within(comm, _DETECTION_SEC)

    def commit(self, ok: bool = True) -> None:
        """Return once every active rank has done its part, as `ok` says of this one. Collective.

        Raises:
            NotCommittedError: on every rank, if some rank has not, or is lost.
        """
        if not self.survives:
            return
        assert self.active is not None
        if not ulfm.agree(self.active.comm, ok):
            ulfm.revoke_all()
            raise NotCommittedError("a rank is lost")
        self._false_alarms = 0
        for loss in self.losses:
            if loss.recovery_sec is None:
                loss.recovery_sec = time.perf_counter() - loss.noticed

    def put_on_standby(self, spares: int, excluded: Collection[int]) -> None:
        """Put some ranks on standby. Collective over all ranks."""

        def activate(world: World) -> tuple[Standby, World | None]:
            standby = plan_standby(world, spares, excluded)
            return standby, _activate(world, standby)

        if plan_standby(self.all_ranks, spares, excluded) != Standby():
            self._standby, self.active = self.attempt(activate)

    def share_history(self, world: World) -> None:
        """Share the losses' times with ranks that were on standby. Collective over `world`."""
        rank_times = [(loss.step, loss.recovery_sec) for loss in self.losses]
        by_loss = zip(*gather_values(world.comm, rank_times), strict=True)
        for loss, known in zip(self.losses, by_loss, strict=True):
            loss.step = next((step for step, _ in known if step is not None), None)
            loss.recovery_sec = next((sec for _, sec in known if sec is not None), None)
            loss.is_logged = loss.recovery_sec is not None

    def end_standby(self) -> None:
        """Release the ranks on standby: the work is done. Collective over all ranks.

        The default process group is then of all ranks again.
        """
        if self._is_released or self.others_failed or not self.has_standby:
            return
        self._is_released = True
        if self.survives:
            # By regrouping, so that all or none are released, whichever rank dies at this moment.
            self._false_alarms = 0
            self._regroup(NotCommittedError("the work is done"))
            return
        if self.active is not None and self.active.rank == 0:
            self._wake_up()
        close_process_group()
        # The old store has counted the active ranks' groups only.
        self.all_ranks.store.restart(self.all_ranks.comm)
        self.active = _activate(self.all_ranks, Standby())

    def close(self) -> None:
        """Wake up the ranks on standby, to end. Not collective.

        For a rank that ends with an error in its own script, which other ranks may not have.
        """
        if self.active is None or self._is_released or not self.has_standby:
            return
        with suppress(Exception):  # after a loss; then they do not wait
            self._wake_up(_FAILED)

    def _wake_up(self, word: bytes = b"") -> None:
        active = self._standby.active(self.all_ranks.infos)
        standby = set(range(self.all_ranks.size)).difference(active)
        wake_up(self.all_ranks.comm, standby, word)

    def _wait_on_standby(self) -> bool:
        """Wait until the others are done or regroup; return whether they are done."""
        comm = self.all_ranks.comm
        message = WakeUp(comm)
        try:
            wait_until(message.has_arrived, max_nap_sec=_MAX_NAP_SEC)
            self.others_failed = message.word == _FAILED
            return True
        except Exception as error:
            if not self.may_be_loss(error, self.all_ranks):
                raise
        # A rank is lost: an active rank revokes the communicator, unless all of them are lost.
        active = self._standby.active(self.all_ranks.infos)

        def is_over() -> bool:
            ulfm.make_progress()
            return comm.Is_revoked() or ulfm.have_failed(comm, active)

        wait_until(is_over, max_nap_sec=_MAX_NAP_SEC)
        return False

    def _regroup(self, noticed_as: Exception) -> None:
        """Continue with the surviving ranks. Collective over them; raises if none is lost."""
        at, noticed = time.time(), time.perf_counter()
        alive = self.all_ranks
        while True:
            ulfm.revoke_all()
            close_process_group()
            alive = survivors_of(alive)
            lost = [info for info in self.all_ranks.infos if info not in alive.infos]
            if not lost:
                self._false_alarms += 1
                may_pass = isinstance(noticed_as, NotCommittedError) or ulfm.may_be_loss(noticed_as)
                if not may_pass or self._false_alarms > _MAX_FALSE_ALARMS:
                    raise noticed_as  # unless an earlier loss may have caused it
            standby = replace_lost(self._standby, alive.infos, lost)
            active = None
            is_released = False
            ok = True
            try:
                is_released = any(gather_values(alive.comm, self._is_released))
                active = _activate(alive, Standby() if is_released else standby)
            except Exception as error:
                if not self.may_be_loss(error, alive):
                    raise
                ok = False
                ulfm.revoke_all()
            if ulfm.agree(alive.comm, ok):
                break
        self.all_ranks = alive
        self.active = active
        self._standby = standby
        self._is_released = is_released
        if lost:
            self.losses.append(RankLoss(lost, at, noticed))


def _activate(world: World, standby: Standby) -> World | None:
    """Make the active ranks the default process group. Collective; None on a rank on standby."""
    close_process_group()
    active = keep_ranks(world, standby.active(world.infos))
    if active is not None:
        open_process_group(active)
    return active
