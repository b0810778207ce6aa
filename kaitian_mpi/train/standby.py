"""Which ranks are on standby, and which spare replaces a lost rank. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kaitian_mpi.mpi.topology import RankInfo


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


def plan_standby(infos: Sequence[RankInfo], spares: int, excluded: Collection[int] = ()) -> Standby:
    """Return which of a job's ranks are on standby; at least one rank stays active.

    If no other rank were active, no rank is excluded.
    """
    numbers = [info.world_rank for info in infos]
    last = frozenset(numbers[len(numbers) - spares :])
    return _with_active(Standby(last, frozenset(excluded) & set(numbers)), infos)


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
    for lost_rank in sorted(lost, key=lambda info: info.world_rank):
        if spares and lost_rank.world_rank not in aside:
            spares.remove(max(spares, key=lambda info: _similarity(info, lost_rank)))
    after = Standby(
        frozenset(info.world_rank for info in spares),
        standby.excluded & {info.world_rank for info in alive},
    )
    return _with_active(after, alive)


def _with_active(standby: Standby, infos: Sequence[RankInfo]) -> Standby:
    """Return `standby`, without excluded ranks if otherwise no rank were active."""
    return standby if standby.active(infos) else Standby(spares=standby.spares)


def _similarity(spare: RankInfo, lost: RankInfo) -> tuple[bool, bool, int]:
    return spare.kind == lost.kind, spare.host == lost.host, -spare.world_rank
