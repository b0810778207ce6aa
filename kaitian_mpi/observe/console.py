"""Console output of world rank 0: lines and tables, for terminals and log files."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence

from kaitian_mpi.mpi.topology import RankInfo, shared_devices
from kaitian_mpi.mpi.world import World
from kaitian_mpi.preflight.verdict import by_value, count_text, differ, size_text
from kaitian_mpi.runtime.mpi_libraries import loaded_library, survival_advice

TABLE_WIDTH = 80
_LEAST_CELL = 12
_quiet = False


def set_quiet(quiet: bool) -> None:
    """Set whether only warnings are printed from now on (`--quiet`)."""
    global _quiet
    _quiet = quiet


def print_rank_0(world: World, text: str) -> None:
    """Print a line from world rank 0, unless the run is quiet."""
    if not _quiet:
        warn_rank_0(world, text)


def warn_rank_0(world: World, text: str) -> None:
    """Print a line from world rank 0, even if the run is quiet."""
    if world.rank == 0:
        print(text, flush=True)


def show_topology(world: World, survives: bool = False) -> None:
    """Print hosts, groups, leaders and devices, from world rank 0."""
    emulated = any(info.emulated for info in world.infos)
    title = f"{count_text(world.size, 'rank')}, {count_text(len(world.groups), 'group')}"
    if world.group.node is not None:
        title += " by kind and host"
    leaders = {group.leader for group in world.groups}
    rows = [("rank", "host", "group", "role", "device", "memory")]
    for info in world.infos:
        row = (
            str(info.world_rank),
            info.host,
            info.kind + (" (emulated)" if info.emulated else ""),
            "leader" if info.world_rank in leaders else "member",
            f"{info.device}  {info.device_name}",
            size_text(info.memory_bytes) + (" (emulated)" if info.emulated_memory else ""),
        )
        rows.append(row)
    title += " (device kinds emulated)" if emulated else ""
    show_table(world, title, rows, left=("host", "group", "role", "device"))
    for line in differing_software(world.infos):
        print_rank_0(world, line)
    for infos in shared_devices(world.infos):
        names = " and ".join(map(str, infos))
        print_rank_0(
            world,
            f"{names} share one device: group {infos[0].kind} communicates through host memory, "
            f"not by {infos[0].library}",
        )
    if survives:
        print_rank_0(world, "fault tolerance: on, the job survives the loss of a rank")
    else:
        advice = survival_advice(loaded_library())
        print_rank_0(world, f"fault tolerance: off, the loss of a rank ends the job; {advice}")


def differing_software(infos: Sequence[RankInfo]) -> list[str]:
    """Return a line for each of torch and Python whose version differs between the ranks."""
    versions = {
        "torch": {info.world_rank: info.torch_version for info in infos},
        "Python": {info.world_rank: info.python_version for info in infos},
    }
    return [f"{name}: {by_value(by_rank)}" for name, by_rank in versions.items() if differ(by_rank)]


def result_line(epochs: int, samples: int, step: int, results: Mapping[str, float]) -> str:
    """Return the line at the end of an epoch, with the results on held-out samples."""
    where = f"stopped in epoch {epochs + 1}" if samples else f"epoch {epochs} done"
    values = [f"held-out {name} {value:.4f}" for name, value in results.items()]
    return " | ".join([where, f"step {step}", *values])


def lost_line(lost: Sequence[RankInfo]) -> str:
    """Return a line that names the ranks that were lost."""
    return f"{', '.join(map(str, lost))} {'was' if len(lost) == 1 else 'were'} lost"


def show_table(
    world: World, title: str, rows: Sequence[Sequence[str]], left: Collection[str] = ()
) -> None:
    """Print a table from world rank 0, unless the run is quiet."""
    if world.rank == 0 and not _quiet:
        common, rows = fit_table(rows, left)
        lines = [f"each: {', '.join(common)}"] if common else []
        print("\n".join([title, *lines, *table_lines(rows, left)]), flush=True)


def fit_table(
    rows: Sequence[Sequence[str]], left: Collection[str], width: int = TABLE_WIDTH
) -> tuple[list[str], list[list[str]]]:
    """Return a table that fits a terminal, and what of it is the same in all rows.

    The widest column is shortened, of which the run folder's files have the values in full; one
    without a name, which has explanations, goes on in further rows.
    """
    columns = [list(column) for column in zip(*rows, strict=True)]
    common = []
    while _width_of(columns) > width:
        same = [column for column in columns[1:] if column[0] and len(set(column[1:])) == 1]
        if not same:
            break
        widest = max(same, key=_cell_width)
        columns.remove(widest)
        common.append(" ".join(widest[:2]))
    shortened = max(
        (column for column in columns if column[0] in left), key=_cell_width, default=[]
    )
    most = _cell_width(shortened) - (_width_of(columns) - width)
    if not shortened or most >= _cell_width(shortened):
        return common, [list(row) for row in zip(*columns, strict=True)]
    most = max(most, _LEAST_CELL)
    if shortened[0]:
        shortened[:] = [cell if len(cell) <= most else f"{cell[: most - 1]}…" for cell in shortened]
        return common, [list(row) for row in zip(*columns, strict=True)]
    place = columns.index(shortened)
    fitted = []
    for row in zip(*columns, strict=True):
        first, *others = textwrap.wrap(row[place], most) or [""]
        fitted.append([*row[:place], first, *row[place + 1 :]])
        fitted += [["" if n != place else part for n in range(len(row))] for part in others]
    return common, fitted


def _cell_width(column: Sequence[str]) -> int:
    return max(map(len, column), default=0)


def _width_of(columns: Sequence[Sequence[str]]) -> int:
    return sum(_cell_width(column) + len(" | ") for column in columns) + 1


def table_lines(rows: Sequence[Sequence[str]], left: Collection[str]) -> list[str]:
    """Return a table as plain text: under mpirun, the terminal and its width are not known."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = "+".join(["", *("-" * (width + 2) for width in widths), ""])
    lines = []
    for row in rows:
        cells = zip(row, rows[0], widths, strict=True)
        aligned = [
            cell.ljust(width) if name in left else cell.rjust(width) for cell, name, width in cells
        ]
        lines.append("| " + " | ".join(aligned) + " |")
    return [rule, lines[0], rule, *lines[1:], rule]
