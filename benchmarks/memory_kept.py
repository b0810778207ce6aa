"""Compares training steps that keep freed memory with ones that return it to the system.

    mpirun -np 4 python benchmarks/memory_kept.py

Prints the ratio of the steps' seconds, returned / kept: above 1, keeping is faster.
"""

from __future__ import annotations

import argparse
import ctypes
import time

import torch
import torch.distributed as dist
from shared.comparison import quartiles
from torch import nn

from kaitian_mpi import init
from kaitian_mpi.devices.cpu import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, keep_freed_memory
from kaitian_mpi.recipes.models import MobileNetV2

_DEFAULT_THRESHOLD = 128 * 1024


def return_freed_memory() -> None:
    """Restore the default thresholds of glibc's malloc."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, _DEFAULT_THRESHOLD)
    libc.mallopt(M_TRIM_THRESHOLD, _DEFAULT_THRESHOLD)
    libc.malloc_trim(0)


def main() -> None:
    """Run the comparison; world rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64, help="images per rank")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of blocks of two steps")
    options = parser.parse_args()
    world = init(devices="cpu")
    model = MobileNetV2(10)
    images = torch.randn(options.batch, 3, 32, 32).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (options.batch,))

    def block() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(2):
            nn.functional.cross_entropy(model(images), labels).backward()
        return time.perf_counter() - start

    found = []
    for pair in range(-1, options.pairs):
        keep_freed_memory()
        block()  # the first block after a change allocates the memory
        kept = block()
        return_freed_memory()
        block()
        seconds = torch.tensor([block(), kept])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if pair >= 0:
            found.append((seconds[0] / seconds[1]).item())
    if world.rank == 0:
        print(f"{world.size} ranks: returned / kept {quartiles(found)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
