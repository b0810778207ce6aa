"""`kaitian-plan --memory`: estimates each rank's memory in each layout, without starting a rank."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from kaitian_mpi.cli.flags import MAX_RANKS, Parsed
from kaitian_mpi.cli.train import start_ranks, task_maker
from kaitian_mpi.config import TrainConfig, flag_name
from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.launcher import find_launch
from kaitian_mpi.runtime.watchdog import stop_watchdog
from kaitian_mpi.supervise.hosts import parse_hostfile
from kaitian_mpi.supervise.launch_command import choose_ranks
from kaitian_mpi.supervise.mpirun_command import read_hostfile

if TYPE_CHECKING:
    from kaitian_mpi.balance.memory import LayoutMemory, RankMemory
    from kaitian_mpi.mpi.world import World
    from kaitian_mpi.train.layouts.estimate import DeviceMemory, MemoryEstimate

_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}
_ENTRY = re.compile(r"(?:([1-9]\d{0,8})x)?([a-z][a-z0-9_]*)(?::(\d+(?:\.\d+)?)(MB|GB|MiB|GiB))?")
_MOST_RANKS = 10_000
_OF_RANKS = ("devices", "wire", "benchmark_seconds", "emulate_kinds", "emulate_slowdown")

ShowTable = Callable[[Sequence[str], Sequence[Sequence[str]]], None]


class RanksAlike(NamedTuple):
    """Some ranks with devices that are alike."""

    number: int
    kind: str
    memory_bytes: int | None
    """Of each; None: that of this machine's devices."""


def estimate(parsed: Parsed, show_table: ShowTable) -> None:
    """Print each rank's memory in each layout."""
    ranks = requested_ranks(parsed)
    config, world = start_ranks(replace(TrainConfig(**parsed.settings), devices="cpu"))
    import torch.distributed as dist

    from kaitian_mpi.train.layouts.estimate import estimate_memory
    from kaitian_mpi.train.layouts.fake_forward import make_without_values
    from kaitian_mpi.train.task import as_task

    devices = devices_of(ranks, world)
    task = make_without_values(partial(as_task, task_maker(config, parsed.by_set), world))
    show(estimate_memory(task, config, devices, world), ranks, config, show_table)
    dist.destroy_process_group()
    stop_watchdog()


def requested_ranks(parsed: Parsed) -> list[RanksAlike]:
    """Return the ranks that the flags name.

    Raises:
        UserError: they are malformed, or cannot be combined.
    """
    chosen = parsed.others
    if find_launch(os.environ):
        raise UserError("--memory starts no ranks; remove mpirun (or srun) before the command")
    other_flags = [flag_name(name) for name in _OF_RANKS if name in parsed.settings]
    other_flags += [f"--{name}" for name in ("world", "save") if getattr(chosen, name) is not None]
    if other_flags:
        raise UserError(
            f"{other_flags[0]} cannot be combined with --memory, which measures nothing"
        )
    ranks = parse_ranks(chosen.memory)
    if chosen.ranks is None and not chosen.hostfile:
        return ranks
    if len(ranks) > 1 or ranks[0].number > 1:
        raise UserError(
            f"--memory {chosen.memory} has a number of ranks, and so has "
            f"{'-n' if chosen.ranks is not None else '--hostfile'}; remove one of them"
        )
    return [ranks[0]._replace(number=_counted(chosen))]


def _counted(chosen: argparse.Namespace) -> int:
    """Return the number of ranks that -n or a hostfile would start."""
    hostfile = chosen.hostfile or ""
    hosts = parse_hostfile(read_hostfile(hostfile), hostfile) if hostfile else ()
    return choose_ranks(chosen.ranks, hosts, hostfile)


def parse_ranks(text: str) -> list[RanksAlike]:
    """Parse `2xcuda:80GB,4xcpu`.

    Raises:
        UserError: it is malformed.
    """
    parsed = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise UserError(
                f"--memory: {entry!r} is not a kind of device; write it like 2xcuda:80GB, with the "
                "number of ranks, their kind and the memory of each in MB, GB, MiB or GiB"
            )
        count, kind, size, unit = match.groups()
        memory_bytes = round(float(size) * _UNITS[unit]) if size else None
        if memory_bytes == 0:
            raise UserError(f"--memory: {entry!r} has no memory; give its size")
        parsed.append(RanksAlike(int(count or 1), kind, memory_bytes))
    if sum(ranks.number for ranks in parsed) > min(MAX_RANKS, _MOST_RANKS):
        raise UserError(f"--memory {text}: at most {_MOST_RANKS:,} ranks can be estimated")
    return parsed


def devices_of(ranks: Sequence[RanksAlike], world: World) -> list[DeviceMemory]:
    """Return the device of each rank.

    Raises:
        UserError: the memory of one is not given, and this machine does not have it.
    """
    from kaitian_mpi.devices.registry import known_kinds
    from kaitian_mpi.train.layouts.estimate import DeviceMemory

    kinds = known_kinds()
    on_cpu = sum(entry.number for entry in ranks if _is_here(entry) and entry.kind == "cpu")
    used: dict[str, int] = {}
    devices = []
    for entry in ranks:
        device = kinds.devices.get(entry.kind)
        is_on_host = device is not None and device.is_host
        for _ in range(entry.number):
            memory_bytes = entry.memory_bytes
            if memory_bytes is None:
                index = used.get(entry.kind, 0)
                used[entry.kind] = index + 1
                if is_on_host:
                    memory_bytes = world.device_kind.memory_limit_bytes(0, on_cpu)
                elif device is not None and index < kinds.counts[entry.kind]:
                    memory_bytes = device.memory_bytes(index)
                else:
                    raise UserError(
                        f"--memory: this machine has {kinds.counts.get(entry.kind, 0)} devices of "
                        f"kind {entry.kind}; give the memory of each, such as {entry.kind}:24GB"
                    )
            devices.append(DeviceMemory(entry.kind, memory_bytes, is_on_host))
    return devices


def _is_here(ranks: RanksAlike) -> bool:
    return ranks.memory_bytes is None


def show(
    memory: MemoryEstimate,
    ranks: Sequence[RanksAlike],
    config: TrainConfig,
    show_table: ShowTable,
) -> None:
    """Print an estimate, in MB for each rank."""
    kinds = [entry.kind for entry in ranks for _ in range(entry.number)]
    count = len(kinds)
    print(
        f"memory of {memory.model}, estimated without running it: "
        f"{memory.parameters:,} parameters, {_mb(memory.parameter_bytes)} MB"
    )
    share = f"{config.global_batch_size:,} samples over {count:,} rank{'s' * (count > 1)}"
    print(f"global batch: {share}, as if all were equally fast")
    if memory.fault:
        print(
            f"note: activations are not in the figures, as the loss needs values ({memory.fault}); "
            "kaitian-plan -n measures them"
        )
    else:
        print(f"activations of a sample: {memory.sample_bytes / 1e6:,.3g} MB, estimated")
    for name in memory.others:
        print(f"note: the state of {name} is counted as Adam's, two numbers for each parameter")
    print("MB by rank; the limit is 90% of the device's memory, as in a training")
    for layout in memory.layouts:
        print(f"layout {layout.layout}: {_verdict(layout, bool(memory.fault))}")
        if layout.ranks:
            heads = "rank", "kind", "weights", "gradients", "optimizer", "activations", "other"
            show_table((*heads, "total", "limit"), _rows(layout.ranks, kinds))


def _verdict(layout: LayoutMemory, is_partial: bool) -> str:
    if not layout.ranks:
        return f"not possible: {layout.why}"
    remark = f" ({layout.why})" if layout.why else ""
    samples = {rank.samples for rank in layout.ranks if rank.samples}
    if not layout.fits:
        lacking = next(n for n, rank in enumerate(layout.ranks) if not rank.fits)
        rank = layout.ranks[lacking]
        needed = f"{_mb(rank.total)} of {_mb(rank.limit)} MB on rank {lacking}"
        return f"does not fit{remark}: {needed}"
    at_once = f"{min(samples):,}" + (f" to {max(samples):,}" if len(samples) > 1 else "")
    fits = "may fit" if is_partial else "fits"
    return f"{fits}{remark}, {at_once} sample{'s' * (at_once != '1')} at once"


def _rows(ranks: Sequence[RankMemory], kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a row for all ranks in a row that are alike."""
    rows = []
    for _, group in groupby(zip(ranks, kinds, range(len(kinds)), strict=True), lambda x: x[:2]):
        same = [(rank, kind, number) for rank, kind, number in group]
        rank, kind, first = same[0]
        numbers = f"{first}" if len(same) == 1 else f"{first}-{same[-1][2]}"
        sizes = rank.parameters, rank.gradients, rank.state, rank.activations, rank.other
        rows.append((numbers, kind, *map(_mb, (*sizes, rank.total, rank.limit))))
    return rows


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f}"
