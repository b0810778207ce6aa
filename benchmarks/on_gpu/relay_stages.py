"""An all_reduce of 64 MB between two kinds against the slowest of its stages alone.

    mpirun -np 2 python benchmarks/on_gpu/relay_stages.py --devices cuda:0,cpu

Prints JSON: seconds of the whole, and of copy out, exchange and copy back of all of it at once, on
the slowest rank; `ratio` is the whole by the slowest stage. Unpipelined it would be about 3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import kaitian_mpi
from kaitian_mpi.devices import device_of
from kaitian_mpi.mpi import host_collectives
from kaitian_mpi.mpi.exchange import gather_values

ELEMENTS = 16 << 20
REPEATS = 7


def main() -> None:
    """Measure, and print from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="auto")
    world = kaitian_mpi.init(devices=parser.parse_args().devices)
    dist.group.WORLD.host.algorithm = "flat"
    tensor = torch.ones(ELEMENTS, device=world.device)
    pins = device_of(world.device).pins_memory
    host = torch.ones(ELEMENTS, pin_memory=pins)
    comm = world.comm.Dup()

    def seconds(act: Callable[[], object]) -> float:
        times = []
        for _ in range(REPEATS + 1):
            dist.barrier()
            world.synchronize()
            began = time.perf_counter()
            act()
            world.synchronize()
            times.append(time.perf_counter() - began)
        return max(gather_values(world.comm, statistics.median(times[1:])))

    found = {
        "whole_sec": seconds(lambda: dist.all_reduce(tensor)),
        "out_sec": seconds(lambda: host.copy_(tensor, non_blocking=True)),
        "exchange_sec": seconds(lambda: host_collectives.allreduce(comm, host)),
        "back_sec": seconds(lambda: tensor.copy_(host, non_blocking=True)),
    }
    slowest = max(found["out_sec"], found["exchange_sec"], found["back_sec"])
    if world.rank == 0:
        print(json.dumps({**found, "ratio": found["whole_sec"] / slowest}))
    comm.Free()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
