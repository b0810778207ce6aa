"""Compares groups by kind with groups by kind and host, between emulated hosts.

    python benchmarks/grouping.py --hosts 2 --devices vendora,vendora,vendorb,vendorb

Each host has the same devices, of two emulated kinds whose vendor's library is gloo over TCP. Times
all_reduce by each algorithm in both ways to group, in alternation, and counts what leaves the
busiest host. Needs root: each host is a network namespace with an sshd, and the kernel's token
bucket filter gives its link a speed, in each direction. Hosts take turns at this machine's cores.
The limit is what has to leave a host at that speed, 2 (H - 1) / H of the bytes. Times are those of
the slowest rank: medians, and quartiles in parentheses. The sums are compared with the exact ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from network import check_sum, seconds_of
from shaped_hosts import ShapedHosts, why_not_shaped
from shared.comparison import quartiles

_TIMEOUT_SEC = 280
_BATCH = 4  # samples of each rank and step


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument(
        "--devices", default="vendora,vendora,vendorb,vendorb", help="of each host's ranks"
    )
    parser.add_argument("--link-mbit", type=float, default=1000.0, help="of each link, each way")
    parser.add_argument("--bytes", type=int, default=9_437_184, help="of the float32 tensor")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--group-by", default="auto", help="as kaitian-train's")
    parser.add_argument("--steps", type=int, default=0, help="of training by each, MobileNetV2")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def start(options: argparse.Namespace) -> int:
    """Run the ranks on emulated hosts; return mpirun's exit code."""
    from emulated_vendors import add_to_path

    slots = [len(options.devices.split(","))] * options.hosts
    with (
        tempfile.TemporaryDirectory(prefix="kaitian-hosts-") as folder,
        tempfile.TemporaryDirectory(prefix="kaitian-kinds-") as packages,
        ShapedHosts(Path(folder), slots) as hosts,
    ):
        hosts.set_link_speed(options.link_mbit)
        environ = dict(os.environ)
        add_to_path(environ, Path(packages))
        command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--worker"]
        return hosts.start_ranks(command, _TIMEOUT_SEC, environ).wait()


def work(options: argparse.Namespace) -> None:
    """Measure, on one rank; rank 0 prints a Markdown table."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    import torch
    import torch.distributed as dist

    import kaitian_mpi
    from kaitian_mpi.mpi.exchange import gather_values
    from kaitian_mpi.train.measure.allreduce import choose_allreduce

    world = kaitian_mpi.init(devices=options.devices, group_by=options.group_by)
    group = dist.group.WORLD
    took = seconds_of(world, lambda: choose_allreduce("auto", world, [options.bytes]))
    if world.rank == 0:  # which has printed what was chosen
        print(f"choosing it took {took:.1f} s")
    for name in group.host.algorithms:
        group.host.algorithm = name
        check_sum(world, options.bytes // 4)
    tensor = torch.zeros(options.bytes // 4)
    seconds: dict[str, list[float]] = {name: [] for name in group.host.algorithms}
    sent: dict[str, list[int]] = {name: [] for name in group.host.algorithms}
    for turn in range(options.rounds):
        for name in list(seconds) if turn % 2 else reversed(seconds):
            group.host.algorithm = name
            before = sent_bytes()
            seconds[name].append(seconds_of(world, lambda: dist.all_reduce(tensor)))
            dist.barrier()
            sent[name].append(max(gather_values(world.comm, sent_bytes() - before)))
    if world.rank == 0:
        report(seconds, sent, options)
    if options.steps:
        report_steps(world, options.steps)
    dist.destroy_process_group()


def report_steps(world, steps: int) -> None:
    """Train by each algorithm in turn, and print the slowest rank's median step. Collective."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    from kaitian_mpi.distributed.reducer import GradientReducer
    from kaitian_mpi.recipes.models import build_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_model("mobilenetv2", 10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(_BATCH, 3, 32, 32), torch.randint(10, (_BATCH,))
    reducer = GradientReducer(model)

    def step() -> None:
        optimizer.zero_grad()
        reducer.arm(1 / world.size)
        functional.cross_entropy(model(x), y).backward()
        reducer.finish()
        optimizer.step()

    seconds: dict[str, list[float]] = {name: [] for name in dist.group.WORLD.host.algorithms}
    for turn in range(steps + 1):
        for name in list(seconds) if turn % 2 else reversed(seconds):
            dist.group.WORLD.host.algorithm = name
            took = seconds_of(world, step)
            if turn:  # the first round warms up
                seconds[name].append(took)
    reducer.close()
    if world.rank == 0:
        print(f"\nsteps of MobileNetV2, {_BATCH} samples a rank:")
        for name, times in seconds.items():
            print(f"{name}, in ms: {quartiles([1e3 * sec for sec in times], '.0f')}", flush=True)


def sent_bytes() -> int:
    """Return how many bytes this host's link has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            return int(figures.split()[8])
    raise RuntimeError("this host has no link eth0")


def report(
    seconds: dict[str, list[float]], sent: dict[str, list[int]], options: argparse.Namespace
) -> None:
    """Print the table."""
    limit = 2 * (options.hosts - 1) / options.hosts * options.bytes * 8 / (options.link_mbit * 1e6)
    print(
        f"\nall_reduce of {options.bytes / 1e6:.1f} MB of float32, {options.hosts} hosts with "
        f"{options.devices}, {options.link_mbit:g} Mbit/s, limit {1e3 * limit:.1f} ms\n"
    )
    print("| algorithm | ms | of the limit | MB sent by the busiest host |\n|---|---|---|---|")
    for name, times in seconds.items():
        print(
            f"| {name} | {quartiles([1e3 * sec for sec in times], '.1f')} "
            f"| {limit / statistics.median(times):.2f} "
            f"| {statistics.median(sent[name]) / 1e6:.1f} |",
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
