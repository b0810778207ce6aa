"""What world rank 0 shows: tables, and lines of progress that suit a terminal and a log file."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from kaitian_mpi.mpi.world import World
from kaitian_mpi.training.benchmark import RankBenchmark

_WIDTH = 110


def say(world: World, text: str) -> None:
    """Print a line from world rank 0."""
    if world.rank == 0:
        print(text, flush=True)


def show_topology(world: World) -> None:
    """Print hosts, groups, leaders and devices, from world rank 0."""
    emulated = any(info.emulated for info in world.infos)
    title = f"{_count(world.size, 'rank')}, {_count(len(world.groups), 'group')}"
    table = _table(title + (" (device kinds emulated)" if emulated else ""))
    for column in ("rank", "host", "group", "role", "device", "memory"):
        table.add_column(column, justify="right" if column in ("rank", "memory") else "left")
    leaders = {group.leader for group in world.groups}
    for info in world.infos:
        table.add_row(
            str(info.world_rank),
            info.host,
            info.kind + (" (emulated)" if info.emulated else ""),
            "leader" if info.world_rank in leaders else "member",
            f"{info.device}  {info.device_name}",
            f"{info.memory_bytes / 2**30:.1f} GiB",
        )
    _show(world, table)


def show_benchmark(
    world: World,
    results: Sequence[RankBenchmark],
    scores: Sequence[float],
    batch_sizes: Sequence[int],
    slowdowns: Sequence[float],
) -> None:
    """Print what each rank scored and the batch it gets, from world rank 0."""
    table = _table(f"benchmark: samples per step sum to {sum(batch_sizes)}")
    for column in ("rank", "group", "ms/sample", "layout", "score", "samples/step", ""):
        table.add_column(column, justify="left" if column in ("group", "layout", "") else "right")
    for rank, result in enumerate(results):
        table.add_row(
            str(rank),
            world.infos[rank].kind,
            f"{1e3 * result.cost.beta_sec:.2f}",
            result.memory_format,
            f"{scores[rank]:.2f}",
            str(batch_sizes[rank]),
            f"slowed {slowdowns[rank]:g}x (emulated)" if slowdowns[rank] > 1 else "",
        )
    _show(world, table)


def progress_line(
    epoch: int, epochs: int, step: int, steps: int, loss: float, rate: float, left_sec: float
) -> str:
    """Return a line of progress: epoch, step, loss, samples per second, time left."""
    minutes, seconds = divmod(round(left_sec), 60)
    return (
        f"epoch {epoch}/{epochs} | step {step}/{steps} | loss {loss:.4f} | "
        f"{rate:.1f} samples/s | {minutes}:{seconds:02d} left"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.ASCII2)


def _show(world: World, table: Table) -> None:
    if world.rank == 0:
        # Plain text of one width: under mpirun neither a terminal nor its width can be told.
        Console(width=_WIDTH, force_terminal=False, no_color=True).print(table)
        sys.stdout.flush()
