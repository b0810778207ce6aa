"""Compares collectives over kaitian, over gloo and by raw mpi4py calls, alternating in one run.

    mpirun -np 2 python benchmarks/collectives.py
    mpirun -np 4 python benchmarks/collectives.py --emulate-kinds gpu,gpu,mlu,mlu

A row's size is that of the larger of an operation's two tensors. Times are those of the slowest
rank; times and ratios are medians over rounds, each of which runs all three. With --dtype bfloat16
or float16 the second column is kaitian's all_reduce of as many float32 elements.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from shared.comparison import in_turns, ratios

import kaitian_mpi

Call = Callable[[], object]
OPERATIONS = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
)
_TURN_SEC = 0.02  # per library and round


def make_calls(operation: str, size_bytes: int, group: dist.ProcessGroup) -> dict[str, Call]:
    """Return calls of the operation by library, each on its own float32 tensors."""
    from mpi4py import MPI

    comm, ranks = MPI.COMM_WORLD, dist.get_world_size()
    large = torch.zeros(max(1, size_bytes // 4 // ranks) * ranks)
    equal, part = torch.zeros_like(large), torch.zeros(large.numel() // ranks)
    a, b, c = large.numpy(), equal.numpy(), part.numpy()
    torch_call = getattr(dist, operation)
    arguments, raw = {
        "all_reduce": ((large,), lambda: comm.Allreduce(MPI.IN_PLACE, a)),
        "all_gather_into_tensor": ((large, part), lambda: comm.Allgather(c, a)),
        "reduce_scatter_tensor": ((part, large), lambda: comm.Reduce_scatter_block(a, c)),
        "all_to_all_single": ((equal, large), lambda: comm.Alltoall(a, b)),
        "broadcast": ((large, 0), lambda: comm.Bcast(a, 0)),
    }[operation]
    return {
        "kaitian": lambda: torch_call(*arguments),
        "raw": raw,
        "gloo": lambda: torch_call(*arguments, group=group),
    }


def make_16_bit_calls(
    dtype: torch.dtype, size_bytes: int, group: dist.ProcessGroup
) -> dict[str, Call]:
    """Return all_reduce calls in a 16-bit dtype; "raw" is kaitian's of as many float32 elements."""
    narrow = torch.zeros(size_bytes // 4, dtype=dtype)
    wide = torch.zeros(size_bytes // 4)
    return {
        "kaitian": lambda: dist.all_reduce(narrow),
        "raw": lambda: dist.all_reduce(wide),
        "gloo": lambda: dist.all_reduce(narrow, group=group),
    }


def slowest(seconds: float) -> float:
    """Return the largest of the ranks' times. Collective."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.allreduce(seconds, MPI.MAX)


def take_turn(call: Call, times: int) -> float:
    """Return the slowest rank's seconds per call, over `times` calls in a row. Collective."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        call()
    return slowest((time.perf_counter() - start) / times)


def compare(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Return each library's seconds per call, by round. Collective."""
    for call in calls.values():
        call()
    times = {
        name: max(1, min(500, int(_TURN_SEC / take_turn(call, 2)))) for name, call in calls.items()
    }
    turns = {name: partial(take_turn, call, times[name]) for name, call in calls.items()}
    return in_turns(turns, rounds, warm_up=0)


def print_row(size_bytes: int, seconds: dict[str, list[float]]) -> None:
    """Print one line of the table."""
    micro = {name: statistics.median(times) * 1e6 for name, times in seconds.items()}
    over_raw = statistics.median(ratios(seconds["kaitian"], seconds["raw"]))
    against_gloo = statistics.median(ratios(seconds["gloo"], seconds["kaitian"]))
    named = f"{size_bytes >> 20} MB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KB"
    print(
        f"| {named} | {micro['kaitian']:,.0f} | {micro['raw']:,.0f} | {micro['gloo']:,.0f} "
        f"| {over_raw:.2f} | {micro['kaitian'] - micro['raw']:+,.0f} | {against_gloo:.1f} |",
        flush=True,
    )


def main() -> None:
    """Run the comparison; world rank 0 prints Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--smallest", type=int, default=1 << 10, help="bytes")
    parser.add_argument("--largest", type=int, default=256 << 20, help="bytes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--emulate-kinds", default="")
    options = parser.parse_args()

    world = kaitian_mpi.init(emulate_kinds=options.emulate_kinds)
    group = dist.new_group(backend="gloo")
    emulated = " (emulated kinds)" if options.emulate_kinds else ""
    sixteen_bit = options.dtype != "float32"
    operations = ["all_reduce"] if sixteen_bit else options.operations.split(",")
    second = "kaitian float32, equal elements" if sixteen_bit else "raw mpi4py"
    for operation in operations:
        if world.rank == 0:
            print(f"\n{operation}, {options.dtype}, {world.size} ranks{emulated}, microseconds\n")
            print(f"| size | kaitian | {second} | gloo | ratio | difference | times gloo |")
            print("|---|---|---|---|---|---|---|")
        size = options.smallest
        while size <= options.largest:
            if sixteen_bit:
                calls = make_16_bit_calls(getattr(torch, options.dtype), size, group)
            else:
                calls = make_calls(operation, size, group)
            seconds = compare(calls, options.rounds)
            if world.rank == 0:
                print_row(size, seconds)
            size *= 4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
