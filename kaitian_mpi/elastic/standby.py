"""Which ranks are on standby, and who replaces a lost rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kaitian_mpi.mpi.topology import RankInfo


@dataclass(frozen=True)
class Standby:
    """The ranks that do not train, by their numbers in MPI's world; all others are active."""

    spares: frozenset[int] = field(default_factory=frozenset)
    """Ready to replace a lost rank."""
    excluded: frozenset[int] = field(default_factory=frozenset)
    """Ranks that the job is faster without."""

    def active(self, infos: Sequence[RankInfo]) -> list[int]:
        """Return the positions in `infos` of the active ranks."""
        aside = self.spares | self.excluded
        return [rank for rank, info in enumerate(infos) if info.world_rank not in aside]


def plan_standby(infos: Sequence[RankInfo], spares: int, excluded: Collection[int] = ()) -> Standby:
    """Return which of a job's ranks are on standby: not the excluded ones where no other is left.

    Args:
        infos: the ranks.
        spares: how many of the last ranks are kept to replace a lost one.
        excluded: numbers in MPI's world of the ranks that the job is faster without.
    """
    numbers = [info.world_rank for info in infos]
    last = frozenset(numbers[len(numbers) - spares :])
    return _with_active(Standby(last, frozenset(excluded) & set(numbers)), infos)


def replace_lost(
    standby: Standby, alive: Sequence[RankInfo], lost: Collection[RankInfo]
) -> Standby:
    """Return which ranks are on standby after a loss.

    Each lost rank that was active is replaced by a spare: one of its device kind and host if there
    is one, else of its kind, else of its host, else the first. Where no rank would be active, the
    excluded ones become active again.

    Args:
        standby: as it was before.
        alive: the ranks that live.
        lost: the ranks that died.
    """
    spares = [info for info in alive if info.world_rank in standby.spares]
    aside = standby.spares | standby.excluded
    for gone in sorted(lost, key=lambda info: info.world_rank):
        if spares and gone.world_rank not in aside:
            spares.remove(max(spares, key=lambda info: _likeness(info, gone)))
    after = Standby(
        frozenset(info.world_rank for info in spares),
        standby.excluded & {info.world_rank for info in alive},
    )
    return _with_active(after, alive)


def _with_active(standby: Standby, infos: Sequence[RankInfo]) -> Standby:
    """Return the same, or with no rank excluded where no rank would be active."""
    return standby if standby.active(infos) else Standby(spares=standby.spares)


def _likeness(info: RankInfo, gone: RankInfo) -> tuple[bool, bool, int]:
    return info.kind == gone.kind, info.host == gone.host, -info.world_rank
