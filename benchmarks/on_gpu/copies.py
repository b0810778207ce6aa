"""The relay's copies of 64 MB against plain copies of page-locked memory. Not under mpirun.

    python benchmarks/on_gpu/copies.py --devices cuda:0

Prints JSON: MB/s out, back, and in both directions at once, of whole tensors in two streams
(`plain`) and of the relay's chunks (`relay`), and the ratio of the latter in both directions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from mpi4py import MPI

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices import Device, known_kinds
from kaitian_mpi.distributed.relay.chunking import agree_on_pace, longest_chunk
from kaitian_mpi.distributed.relay.copies import Copies, copies_of
from kaitian_mpi.distributed.relay.relay import Slots, exchange_in_chunks

BYTES = 64 << 20
REPEATS = 7


def best(device: Device, index: int, act: Callable[[], object]) -> float:
    """Return the shortest of some times, in seconds, after two to warm up."""
    seconds = []
    for _ in range(REPEATS + 2):
        device.synchronize(index)
        began = time.perf_counter()
        act()
        device.synchronize(index)
        seconds.append(time.perf_counter() - began)
    return min(seconds[2:])


def chunk_lengths(copies: Copies, on_device: torch.Tensor, host: torch.Tensor) -> list[int]:
    """Return the lengths of the chunks that the relay would choose for these copies."""

    def stages(size: int) -> list[Callable[[], None]]:
        part, memory = on_device[:size], host[:size]
        copies.begin(part)
        return [
            lambda: copies.copy_out(memory, part, None).synchronize(),
            lambda: copies.copy_back(part, memory).synchronize(),
        ]

    pace = agree_on_pace(MPI.COMM_SELF, longest_chunk(TrainConfig.relay_memory_mb), stages)
    return pace.lengths(on_device.nbytes)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", required=True, help="one device, such as cuda:0")
    kind, _, index = parser.parse_args().devices.partition(":")
    device, number = known_kinds().devices[kind], int(index or 0)
    device.select(number)
    place = device.torch_device(number)
    memory = [torch.empty(BYTES, dtype=torch.uint8, device=place) for _ in range(2)]
    pinned = [
        torch.empty(BYTES, dtype=torch.uint8, pin_memory=device.pins_memory) for _ in range(2)
    ]
    copies = copies_of(place)

    def out() -> None:
        copies.begin(memory[0])
        copies.copy_out(pinned[0], memory[0], None).synchronize()

    def back() -> None:
        copies.begin(memory[1])
        copies.copy_back(memory[1], pinned[1]).synchronize()

    def both() -> None:
        copies.begin(memory[0])
        ends = [copies.copy_out(pinned[0], memory[0], None)]
        ends.append(copies.copy_back(memory[1], pinned[1]))
        for end in ends:
            end.synchronize()

    lengths = chunk_lengths(copies, memory[0], pinned[0])
    slots = Slots(pins=device.pins_memory)

    def relay() -> None:
        exchange_in_chunks(memory[0].split(lengths), lambda host: None, copies, slots)

    plain_both, relay_both = best(device, number, both), best(device, number, relay)
    found = {
        "device": device.name(number),
        "plain_out_mb_per_sec": BYTES / best(device, number, out) / 1e6,
        "plain_back_mb_per_sec": BYTES / best(device, number, back) / 1e6,
        "plain_both_mb_per_sec": 2 * BYTES / plain_both / 1e6,
        "relay_both_mb_per_sec": 2 * BYTES / relay_both / 1e6,
        "longest_chunk_bytes": max(lengths),
        "ratio": plain_both / relay_both,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
