"""Measures the relay between two device kinds, whole and by stage, on the fake accelerator.

    mpirun -np 2 python benchmarks/relay.py

Two ranks have a fake accelerator each, of different kinds (tests/vendor/fake_device): its copies
take the time that a bus of the given bandwidth would need, in each direction. By default that
bandwidth is the one at which MPI exchanges chunks, so that all stages take equally long and overlap
gains most. A copy engine needs no processor, so no data are moved while it is timed, unless with
--move-data: on a host of two cores, of which MPI needs both, that would time the processor. The sum
is checked before, with the data moved. Prints the median and the quartiles over rounds, each of
which measures every row; times are those of the slower rank.

    copy out, exchange, copy back    each stage alone, all chunks
    one after the other              every chunk through all three stages before the next
    half duplex                      the relay with one stream for both directions
    relay                            as it is: all_reduce of one tensor
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from shared.comparison import quartiles, ratios

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/vendor"))  # which adds its device kinds

import fake_device
import torch
import torch.distributed as dist

import kaitian_mpi
from kaitian_mpi.distributed.relay.copies import StreamCopies
from kaitian_mpi.distributed.relay.relay import Slots, exchange_in_chunks
from kaitian_mpi.mpi import host_collectives
from kaitian_mpi.mpi.exchange import gather_values

REPEATS = 7


class HalfDuplexCopies(StreamCopies):
    """Copies in both directions on one stream."""

    def __init__(self, module, device) -> None:
        super().__init__(module, device)
        self.back = self.out


class Stages:
    """The stages of one allreduce between two ranks."""

    def __init__(self, world, tensor: torch.Tensor) -> None:
        self._comm = dist.group.WORLD.comms.lane
        self._tensor = tensor
        self.chunks = dist.group.WORLD.relay.split(self._comm, tensor)
        module = torch.get_device_module(world.device)
        self._copies = StreamCopies(module, world.device)
        self._half_duplex = HalfDuplexCopies(module, world.device)
        self._slots = Slots(pins=True)
        self._slots.provide(len(self.chunks), max(chunk.nbytes for chunk in self.chunks))

    def rows(self) -> dict[str, Callable[[], None]]:
        """Return what is measured, by name; each call ends when the device is done."""
        return {
            "copy out": self._copy_out,
            "exchange": self._exchange_all,
            "copy back": self._copy_back,
            "one after the other": self._one_by_one,
            "half duplex": lambda: self._pipeline(self._half_duplex),
            "relay": lambda: dist.all_reduce(self._tensor),
        }

    def _exchange(self, chunk: torch.Tensor) -> None:
        host_collectives.allreduce(self._comm, chunk)

    def _exchange_all(self) -> None:
        for chunk in self.chunks:
            self._exchange(self._slots.take().view_as(chunk))

    def _copy_out(self) -> None:
        self._copies.begin(self._tensor)
        for chunk in self.chunks:
            end = self._copies.copy_out(self._slots.take().view_as(chunk), chunk, None)
        end.synchronize()

    def _copy_back(self) -> None:
        for chunk in self.chunks:
            end = self._copies.copy_back(chunk, self._slots.take().view_as(chunk))
        end.synchronize()

    def _one_by_one(self) -> None:
        self._copies.begin(self._tensor)
        for chunk in self.chunks:
            host = self._slots.take().view_as(chunk)
            self._copies.copy_out(host, chunk, None).synchronize()
            self._exchange(host)
            self._copies.copy_back(chunk, host).synchronize()

    def _pipeline(self, copies: StreamCopies) -> None:
        exchange_in_chunks(self.chunks, self._exchange, copies, self._slots)


def seconds_of(world, call: Callable[[], None]) -> float:
    """Return the slower rank's seconds for a call. Collective."""
    world.synchronize()
    dist.barrier()
    began = time.perf_counter()
    call()
    world.synchronize()
    return max(gather_values(world.comm, time.perf_counter() - began))


def bandwidth_of_mpi(world, total_bytes: int) -> float:
    """Return the bytes per second at which MPI reduces chunks of 1 MB. Collective."""
    chunk, comm = torch.zeros(1 << 18), dist.group.WORLD.comms.lane

    def exchange() -> None:
        for _ in range(total_bytes >> 20):
            host_collectives.allreduce(comm, chunk)

    return total_bytes / statistics.median(seconds_of(world, exchange) for _ in range(REPEATS))


def check_sum(world, tensor: torch.Tensor) -> None:
    """Sum a tensor, with the data moved, in a group of its own; set it to zero. Collective."""
    group = dist.new_group()
    group.host.algorithm = "leader"
    tensor.fill_(world.rank + 1)
    dist.all_reduce(tensor, group=group)
    assert set(fake_device.values(tensor).unique().tolist()) == {3.0}
    dist.destroy_process_group(group)
    tensor.zero_()


def main() -> None:
    """Run the benchmark; rank 0 prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64, help="of the tensor, in MB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory-mb", type=int, default=32, help="as --relay-memory-mb")
    parser.add_argument(
        "--gb-per-sec", type=float, default=0.0, help="of the bus, each way; 0: MPI's"
    )
    parser.add_argument("--move-data", action="store_true", help="let the processor copy the data")
    options = parser.parse_args()
    world = kaitian_mpi.init(devices="vendor,vendor2")
    world.communication.relay_memory_mb = options.memory_mb
    dist.group.WORLD.host.algorithm = "leader"
    tensor = torch.zeros(options.megabytes << 18, device=world.device)
    rate = options.gb_per_sec * 1e9 or bandwidth_of_mpi(world, tensor.nbytes)
    fake_device.set_bandwidth(rate)
    check_sum(world, tensor)
    for engine in fake_device.engines.values():
        engine.moves_data = options.move_data
    stages = Stages(world, tensor)
    rows = stages.rows()
    if not options.gb_per_sec:  # the chunks in turn, which one chunk again and again is faster than
        times = [seconds_of(world, rows["exchange"]) for _ in range(REPEATS)]
        rate = tensor.nbytes / statistics.median(times[1:])
        fake_device.set_bandwidth(rate)
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(1 + options.rounds):
        for name, call in rows.items():
            took = seconds_of(world, call)
            if number:  # the first round warms up
                seconds[name].append(took)
    if world.rank == 0:
        report(seconds, stages, rate, options)
    dist.destroy_process_group()


def report(seconds: dict[str, list[float]], stages: Stages, rate: float, options) -> None:
    """Print the table; the ratio is to the slowest stage of the same round."""
    slowest = [max(times) for times in zip(*list(seconds.values())[:3], strict=True)]
    shortest, longest = (act(each.nbytes >> 10 for each in stages.chunks) for act in (min, max))
    print(
        f"\nallreduce of {options.megabytes} MB between two groups (fake accelerators), bus "
        f"{rate / 1e9:.2f} GB/s each way, {len(stages.chunks)} chunks of {shortest} to {longest} "
        "KB\n"
    )
    print("| | ms (quartiles) | over the slowest stage (quartiles) |\n|---|---|---|")
    for name, times in seconds.items():
        print(
            f"| {name} | {quartiles([1e3 * took for took in times], '.1f')} "
            f"| {quartiles(ratios(times, slowest), '.2f')} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
