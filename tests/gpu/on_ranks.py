"""What must hold on ranks with and without an accelerator; run by `test_ranks.py` under mpirun.

Prints `NAME: ok`, or `NAME: skipped, WHY`, for each check, from rank 0. The first one that fails
ends the job with a traceback.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise

import torch
import torch.distributed as dist
from batch_norms import check_any_split
from collective_cases import check_moves, check_reductions, check_sum
from shared import stand_in
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from uneven import by_hook, by_reducer, check_like_one_process, network

import kaitian_mpi
from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.collectives.hybrid import ALGORITHMS
from kaitian_mpi.mpi.exchange import gather_values

LARGE = (1 if stand_in.KIND == stand_in.STAND_IN else 16) << 20  # elements: 64 MB of float32
QUEUED_SEC = 0.3


class SkippedError(Exception):
    """The check cannot be made here."""


def main() -> None:
    world = kaitian_mpi.init(devices=sys.argv[1])
    for check in CHECKS:
        try:
            check(world)
            found = "ok"
        except SkippedError as reason:
            found = f"skipped, {reason}"
        dist.barrier()
        if world.rank == 0:
            print(f"{check.__name__}: {found}", flush=True)
    dist.destroy_process_group()


def on_own_device(world) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(world.device, copy=True)


def collectives_across_kinds(world) -> None:
    """Every operation, with tensors on each rank's own device; sums also where chunks end."""
    put = on_own_device(world)
    for length in (1, 1000, 100_003):
        check_moves(world, put, torch.float32, length, [world.size - 1])
        check_reductions(world, put, torch.float32, length)
    for algorithm in ALGORITHMS:
        dist.group.WORLD.host.algorithm = algorithm
        for length in (1, 1000, LARGE + 1):
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                check_sum(world, put, dtype, length, in_background=True)


def queue_work(tensor: torch.Tensor, repeats: int) -> None:
    """Queue in-place work that in the end has added `repeats`."""
    for _ in range(repeats):
        tensor.add_(1.0)


def repeats_for(tensor: torch.Tensor, world, seconds: float) -> int:
    """Return how many repeats of the work take so long."""
    queue_work(tensor, 8)
    world.synchronize()
    began = time.perf_counter()
    queue_work(tensor, 8)
    world.synchronize()
    return max(8, int(8 * seconds / (time.perf_counter() - began)))


def order_with_streams(world) -> None:
    """A collective comes after work queued before it, and before work queued after its wait."""
    module = device_of(world.device).streams()
    tensor = torch.zeros(LARGE, device=world.device)
    repeats = min(gather_values(world.comm, repeats_for(tensor, world, QUEUED_SEC)))
    for algorithm in ALGORITHMS:
        dist.group.WORLD.host.algorithm = algorithm
        tensor.zero_()
        queue_work(tensor, repeats)
        work = dist.all_reduce(tensor, async_op=True)
        unrelated = torch.ones(LARGE, device=world.device)  # would take memory that is free
        work.wait()
        tensor.mul_(2.0)
        assert tensor[::4096].cpu().eq(2.0 * repeats * world.size).all(), algorithm
        assert unrelated[::4096].cpu().eq(1.0).all()
    side = None if module is None else module.Stream(world.device)
    with nullcontext() if module is None else module.stream(side):  # the script's own stream
        tensor.fill_(1.0)
        queue_work(tensor, repeats)
        dist.all_reduce(tensor)
        doubled = tensor * 2.0
    if side is not None:
        side.synchronize()
    assert doubled[::4096].cpu().eq(2.0 * (repeats + 1) * world.size).all()


def memory_of_dropped_tensors(world) -> None:
    """A tensor that the script drops right after the call is summed all the same."""
    results = [torch.zeros(1, device=world.device) for _ in range(4)]
    for result in results:
        tensor = torch.full((LARGE // 4,), 1.0, device=world.device)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        result.add_(tensor[:1])
        del tensor, work
        torch.full((LARGE // 4,), 99.0, device=world.device)
    assert [result.item() for result in results] == [float(world.size)] * 4


def vendor_group(world) -> None:
    """In a group of accelerators, sums are right and `wait()` blocks the stream, not the host."""
    members = [info.world_rank for info in world.infos if info.kind == world.infos[0].kind]
    if len(members) < 2 or device_of(world.device).vendor_backend is None:
        raise SkippedError("one accelerator, or none with a library")
    group = dist.new_group(members)
    if world.rank in members:
        tensor = torch.full((LARGE,), float(world.rank + 1), device=world.device)
        dist.all_reduce(tensor, group=group)
        assert tensor[::4096].cpu().eq(sum(rank + 1 for rank in members)).all()
        queue_work(tensor, repeats_for(tensor, world, QUEUED_SEC))
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        waited = time.perf_counter() - began
        world.synchronize()
        took = time.perf_counter() - began
        assert waited < took / 2, f"wait() took {waited:.3f} s of {took:.3f} s"
        dist.destroy_process_group(group)


def gradient_of_the_whole_batch(world) -> None:
    """Uneven batches over both kinds give the weights of one process, in float64."""
    for way in (by_hook, by_reducer):
        check_like_one_process(world, way, tolerance=1e-10)


def train_in(world, dtype: torch.dtype) -> None:
    available = torch.amp.is_autocast_available(world.device.type)
    # The fake accelerator says that it has autocast, and has no kernels for it.
    if stand_in.KIND == stand_in.STAND_IN or not all(gather_values(world.comm, available)):
        raise SkippedError("torch has no autocast for this device")
    model = network().to(world.device)
    ddp = DistributedDataParallel(model)
    scaler = torch.amp.GradScaler(world.device.type, enabled=dtype is torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(world.rank)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(4):
        images = torch.randn(16, 3, 8, 8, generator=generator).to(world.device)
        labels = torch.randint(5, (16,), generator=generator).to(world.device)
        optimizer.zero_grad()
        with torch.autocast(world.device.type, dtype):
            loss = cross_entropy(ddp(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    sums = [parameter.detach().double().sum().item() for parameter in model.parameters()]
    everywhere = gather_values(world.comm, sums)
    assert all(one == other for one, other in pairwise(everywhere)), everywhere
    changed = [(a - b).abs().max().item() for a, b in zip(before, model.parameters(), strict=True)]
    assert max(changed) > 0
    assert torch.tensor(sums).isfinite().all()


def amp_bf16(world) -> None:
    """Autocast to bfloat16 under stock DDP leaves the same weights on all ranks."""
    train_in(world, torch.bfloat16)


def amp_fp16(world) -> None:
    """So does float16 with a gradient scaler: all ranks skip the same steps."""
    train_in(world, torch.float16)


def sync_batch_norm(world) -> None:
    """Statistics over both kinds, of uneven batches, are those of one process."""
    check_any_split(world, tolerance=1e-10)


CHECKS: tuple[Callable[..., None], ...] = (
    collectives_across_kinds, vendor_group, order_with_streams, memory_of_dropped_tensors,
    gradient_of_the_whole_batch, amp_bf16, amp_fp16, sync_batch_norm,
)  # fmt: skip

if __name__ == "__main__":
    main()
