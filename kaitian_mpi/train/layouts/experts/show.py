"""Shows which rank holds which experts."""

from __future__ import annotations

from collections.abc import Sequence

from kaitian_mpi.balance.experts import ExpertPlacement
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0, show_table, size_text
from kaitian_mpi.train.layouts.experts.measure import ExpertFacts, ExpertsPlan
from kaitian_mpi.train.layouts.experts.names import expert_names, names_in_short


def show_placement(world: World, plan: ExpertsPlan, facts: ExpertFacts) -> None:
    """Print which rank holds which experts, and why one holds none, from rank 0."""
    placement = plan.placement
    names = expert_names(plan.mixtures)
    rows = [("rank", "samples", "experts", "mirrors", "ms a step", "memory")]
    for rank, info in enumerate(world.infos):
        held = names_in_short([names[number] for number in placement.experts_of(rank)])
        mirrored = sum(mirror == rank for mirror in placement.mirrors)
        rows.append(
            (
                str(info.world_rank),
                str(placement.batch_sizes[rank]),
                held or "none",
                str(mirrored or "none"),
                f"{1e3 * placement.rank_sec[rank]:.1f}" if plan.is_measured else "-",
                size_text(placement.bytes_by_rank[rank]),
            )
        )
    title = f"layout experts: {len(names)} experts"
    if plan.is_measured:
        title += f", predicted step {1e3 * placement.step_sec:.1f} ms"
    if placement.rounds > 1:
        title += f", in {placement.rounds} micro-batches"
    show_table(world, title, rows, left=("experts",))
    for line in placement_notes(world.infos, placement, facts):
        print_rank_0(world, line)


def placement_notes(
    infos: Sequence[RankInfo], placement: ExpertPlacement, facts: ExpertFacts
) -> list[str]:
    """Return lines on ranks without memory for an expert, and on experts without a mirror."""
    notes = []
    smallest = min(expert.held_bytes for expert in facts.experts)
    for rank, info in enumerate(infos):
        free = facts.by_place[info.place].free_bytes
        if free < smallest and not placement.experts_of(rank):
            notes.append(
                f"{info} holds no expert: the smallest takes {size_text(smallest)} with its "
                f"gradients and optimizer state, and {size_text(int(free))} are free there"
            )
    count = len(placement.mirrors)
    if 0 < placement.mirrored < count:
        notes.append(
            f"layout experts: there is memory for mirrors of {placement.mirrored} of {count} "
            "experts; if a rank is lost that holds another one, training continues from a "
            "checkpoint"
        )
    return notes
