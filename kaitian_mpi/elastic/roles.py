"""Who trains and who stands by."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kaitian_mpi.mpi.topology import RankInfo


@dataclass(frozen=True)
class Roles:
    """What each rank that lives is there for, by the numbers that MPI gave; the others train."""

    spares: frozenset[int] = field(default_factory=frozenset)
    """Stand by to take the place of one that is lost."""
    left_out: frozenset[int] = field(default_factory=frozenset)
    """The job is faster without."""

    def working(self, infos: Sequence[RankInfo]) -> list[int]:
        """Return the positions in `infos` of those that train."""
        aside = self.spares | self.left_out
        return [rank for rank, info in enumerate(infos) if info.world_rank not in aside]


def spare_roles(infos: Sequence[RankInfo], spares: int) -> Roles:
    """Return the roles where the last few ranks stand by."""
    names = [info.world_rank for info in infos]
    return Roles(spares=frozenset(names[len(names) - spares :]))


def plan_roles(infos: Sequence[RankInfo], spares: int, left_out: Collection[int]) -> Roles:
    """Return the roles of a job's ranks.

    Args:
        infos: the ranks.
        spares: how many of the last stand by to take the place of one that is lost.
        left_out: positions in `infos` of those that the job is faster without.
    """
    names = [info.world_rank for info in infos]
    excluded = frozenset(names[rank] for rank in left_out)
    return Roles(spare_roles(infos, spares).spares, excluded)


def plan_recovery(roles: Roles, alive: Sequence[RankInfo], lost: Collection[RankInfo]) -> Roles:
    """Return the roles after a loss.

    Each lost rank that trained is replaced by a spare: one of its device kind and host if there is
    one, else of its kind, else of its host, else the first. Where nobody is left to train, those
    come back that the job was faster without.

    Args:
        roles: those so far.
        alive: the ranks that live.
        lost: those that do not.
    """
    spares = [info for info in alive if info.world_rank in roles.spares]
    aside = roles.spares | roles.left_out
    for gone in sorted(lost, key=lambda info: info.world_rank):
        if spares and gone.world_rank not in aside:
            spares.remove(max(spares, key=lambda info: _likeness(info, gone)))
    after = Roles(
        frozenset(info.world_rank for info in spares),
        roles.left_out & {info.world_rank for info in alive},
    )
    return after if after.working(alive) else Roles(spares=after.spares)


def _likeness(info: RankInfo, gone: RankInfo) -> tuple[bool, bool, int]:
    return info.kind == gone.kind, info.host == gone.host, -info.world_rank
