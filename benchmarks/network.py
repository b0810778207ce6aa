"""Compares all_reduce between emulated hosts over kaitian and over gloo with the links' limit.

    python benchmarks/network.py --slots 1,2,1 --link-mbit 1000

Needs root: each host is a network namespace with an sshd, and the kernel's token bucket filter
gives its link a speed, in each direction. Hosts take turns at this machine's cores. The limit is
what has to leave the busiest host at that speed, 2 (H - 1) / H of the bytes, without the headers of
Ethernet, IP and TCP, which take another 4.5%. Times are those of the slowest rank; calls over
kaitian and over gloo alternate. Medians, and quartiles in parentheses.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from shaped_hosts import ShapedHosts, why_not_shaped
from shared.comparison import in_turns, quartiles, ratios

_TIMEOUT_SEC = 110


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", default="1,2,1", help="the ranks of each host")
    parser.add_argument("--link-mbit", type=float, default=1000.0, help="of each link, each way")
    parser.add_argument("--bytes", type=int, default=9_437_184, help="of the float32 tensor")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--all", action="store_true", help="time every route, not only the chosen")
    parser.add_argument("--emulate-kinds", default="", help="as kaitian-run's")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def start(options: argparse.Namespace) -> int:
    """Run the ranks on emulated hosts; return mpirun's exit code."""
    slots = [int(word) for word in options.slots.split(",")]
    with (
        tempfile.TemporaryDirectory(prefix="kaitian-hosts-") as folder,
        ShapedHosts(Path(folder), slots) as hosts,
    ):
        hosts.set_link_speed(options.link_mbit)
        command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--worker"]
        return hosts.start_ranks(command, _TIMEOUT_SEC).wait()


def work(options: argparse.Namespace) -> None:
    """Measure, on one rank; rank 0 prints a Markdown table."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    import torch
    import torch.distributed as dist

    import kaitian_mpi
    from kaitian_mpi.distributed.network.link import RouteChoice

    world = kaitian_mpi.init(emulate_kinds=options.emulate_kinds)
    gloo = dist.new_group(backend="gloo")
    link = dist.group.WORLD.links[dist.group.WORLD.comms.world.py2f()]
    chosen = link.choose()
    tensor = torch.zeros(options.bytes // 4)
    check_sum(world, options.bytes // 4)
    calls: dict[str, Callable[[], object]] = {}

    def over(choice: RouteChoice) -> None:
        link.choice = choice
        dist.all_reduce(tensor)

    calls["kaitian: " + str(chosen.route)] = lambda: over(chosen)
    if options.all:
        for route in link.routes:
            if route != chosen.route:
                calls["kaitian: " + str(route)] = partial(over, RouteChoice(route))
    calls["gloo"] = lambda: dist.all_reduce(tensor, group=gloo)
    turns = {name: partial(seconds_of, world, call) for name, call in calls.items()}
    seconds = in_turns(turns, options.rounds)
    if world.rank == 0:
        report(seconds, options, chosen.describe())
    dist.destroy_process_group()


def check_sum(world, elements: int) -> None:
    """Check that every rank gets the exact sum."""
    import torch
    import torch.distributed as dist

    tensor = torch.arange(elements, dtype=torch.float32) % 1000 + world.rank
    dist.all_reduce(tensor)
    offset = world.size * (world.size - 1) / 2
    expected = torch.arange(elements, dtype=torch.float32) % 1000 * world.size + offset
    assert torch.equal(tensor, expected)


def seconds_of(world, call: Callable[[], object]) -> float:
    """Return the slowest rank's seconds for a call. Collective."""
    import torch.distributed as dist

    from kaitian_mpi.mpi.exchange import gather_values

    dist.barrier()
    began = time.perf_counter()
    call()
    return max(gather_values(world.comm, time.perf_counter() - began))


def report(seconds: dict[str, list[float]], options: argparse.Namespace, chosen: str) -> None:
    """Print the table."""
    hosts = len(options.slots.split(","))
    limit = 2 * (hosts - 1) / hosts * options.bytes * 8 / (options.link_mbit * 1e6)
    gloo = seconds["gloo"]
    print(f"\nchosen: {chosen}")
    print(
        f"\nall_reduce of {options.bytes / 1e6:.1f} MB of float32, hosts with {options.slots} "
        f"ranks, {options.link_mbit:g} Mbit/s, limit {1e3 * limit:.1f} ms\n"
    )
    print("| | ms | of the limit | gloo / it |\n|---|---|---|---|")
    for name, times in seconds.items():
        print(
            f"| {name} | {quartiles([1e3 * sec for sec in times], '.1f')} "
            f"| {limit / statistics.median(times):.2f} "
            f"| {statistics.median(ratios(gloo, times)):.2f} |",
            flush=True,
        )


def main() -> int:
    """Run the benchmark, or one of its ranks."""
    parser = make_parser()
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    if reason := why_not_shaped():
        parser.error(f"hosts cannot be emulated here: {reason}")
    return start(options)


if __name__ == "__main__":
    sys.exit(main())
