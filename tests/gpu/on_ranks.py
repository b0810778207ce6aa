"""What must hold on ranks with and without an accelerator; run by `test_ranks.py` under mpirun.

Prints `NAME: ok`, or `NAME: skipped, WHY`, for each check, from rank 0. The first one that fails
ends the job with a traceback.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise

import stand_in
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import kaitian_mpi
from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.collectives.hybrid import ALGORITHMS
from kaitian_mpi.mpi.exchange import gather_values

LARGE = (1 if stand_in.KIND in stand_in.STAND_INS else 16) << 20  # elements: 64 MB of float32
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


def accelerators(world) -> list[int]:
    return [info.world_rank for info in world.infos if info.kind == world.infos[0].kind]


def sum_of_ranks(size: int) -> int:
    return size * (size + 1) // 2


def collectives_across_kinds(world) -> None:
    """Every operation, with tensors on each rank's own device."""
    size, rank = world.size, world.rank
    for length in (1, 1000, 100_003):
        mine = torch.full((length,), float(rank + 1), device=world.device)
        shared = mine.clone()
        dist.all_reduce(shared)
        assert (shared.cpu() == sum_of_ranks(size)).all()
        sent = mine.clone()
        dist.broadcast(sent, size - 1)
        assert (sent.cpu() == size).all()
        gathered = [torch.zeros_like(mine) for _ in range(size)]
        dist.all_gather(gathered, mine)
        assert [part[0].item() for part in gathered] == list(range(1, size + 1))
        parts = [torch.full_like(mine, float(rank + 1 + to)) for to in range(size)]
        scattered = torch.zeros_like(mine)
        dist.reduce_scatter(scattered, parts)
        assert (scattered.cpu() == sum_of_ranks(size) + size * rank).all()
        received = [torch.zeros_like(mine) for _ in range(size)]
        dist.all_to_all(received, parts)
        assert [part[0].item() for part in received] == [r + 1 + rank for r in range(size)]


def relay_sums(world) -> None:
    """The relay's algorithms sum every dtype and length, also where chunks end."""
    for algorithm in ALGORITHMS:
        dist.group.WORLD.algorithm = algorithm
        for length in (1, 1000, LARGE + 1):
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                values = torch.arange(length, device=world.device) % 13
                tensor = (values * (world.rank + 1)).to(dtype)
                dist.all_reduce(tensor, async_op=True).wait()
                expected = (values * sum_of_ranks(world.size)).to(dtype)
                assert torch.equal(tensor.cpu(), expected.cpu()), (algorithm, length, dtype)


def vendor_group(world) -> None:
    """The accelerators alone, through their own library."""
    members = accelerators(world)
    if len(members) < 2:
        raise SkippedError("one accelerator")
    group = dist.new_group(members)
    if world.rank in members:
        tensor = torch.full((LARGE,), float(world.rank + 1), device=world.device)
        dist.all_reduce(tensor, group=group)
        expected = sum(rank + 1 for rank in members)
        assert tensor[::4096].cpu().eq(expected).all()
        dist.destroy_process_group(group)


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
        dist.group.WORLD.algorithm = algorithm
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


def wait_blocks_no_host(world) -> None:
    """In a group of accelerators, `wait()` makes the stream wait, not the host."""
    members = accelerators(world)
    if len(members) < 2 or device_of(world.device).vendor_backend is None:
        raise SkippedError("one accelerator, or none with a library")
    group = dist.new_group(members)
    if world.rank in members:
        tensor = torch.zeros(LARGE, device=world.device)
        dist.all_reduce(tensor, group=group)
        repeats = repeats_for(tensor, world, QUEUED_SEC)
        queue_work(tensor, repeats)
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        waited = time.perf_counter() - began
        world.synchronize()
        took = time.perf_counter() - began
        assert waited < took / 2, f"wait() took {waited:.3f} s of {took:.3f} s"
        dist.destroy_process_group(group)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 64), nn.Linear(64, 5)
    )


def gradient_of_the_whole_batch(world) -> None:
    """Uneven batches over both kinds give the weights of one process, in float64."""
    shares = [7, 1, 5, 3][: world.size]
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(5, sum(shares), 3, 8, 8, generator=generator).double()
    labels = torch.randint(5, (5, sum(shares)), generator=generator)
    alone = network().double()
    model = copy.deepcopy(alone).to(world.device)
    ddp = kaitian_mpi.data_parallel(model, bucket_cap_mb=0.02)
    start = sum(shares[: world.rank])
    own = slice(start, start + shares[world.rank])
    for trained, part, device in ((alone, slice(None), "cpu"), (ddp, own, world.device)):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
        for step in range(5):
            optimizer.zero_grad()
            output = trained(images[step, part].to(device))
            cross_entropy(output, labels[step, part].to(device)).backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert (ours.detach().cpu() - theirs).abs().max().item() <= 1e-10


def train_in(world, dtype: torch.dtype) -> None:
    available = torch.amp.is_autocast_available(world.device.type)
    # The fake accelerator says that it has autocast, and has no kernels for it.
    if stand_in.KIND == "vendor" or not all(gather_values(world.comm, available)):
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
    shares = [5, 2, 4, 3][: world.size]
    generator = torch.Generator().manual_seed(7)
    batch = torch.randn(sum(shares), 6, 4, 4, generator=generator, dtype=torch.float64)
    alone = nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)).double()
    torch.manual_seed(11)
    for parameter in alone.parameters():
        nn.init.normal_(parameter)
    converted = kaitian_mpi.convert_sync_batchnorm(copy.deepcopy(alone)).to(world.device)
    start = sum(shares[: world.rank])
    own = batch[start : start + shares[world.rank]].to(world.device)
    ddp = kaitian_mpi.data_parallel(converted)
    expected, found = alone(batch), ddp(own)
    theirs = expected[start : start + shares[world.rank]]
    assert (found.detach().cpu() - theirs.detach()).abs().max().item() <= 1e-10
    for output in (expected, found):
        output.pow(3).flatten(1).sum(1).mean().backward()
    for ours, whole in zip(converted.parameters(), alone.parameters(), strict=True):
        scale = max(1.0, whole.grad.abs().max().item())
        assert (ours.grad.cpu() - whole.grad).abs().max().item() / scale <= 1e-10


CHECKS: tuple[Callable[..., None], ...] = (
    collectives_across_kinds,
    relay_sums,
    vendor_group,
    order_with_streams,
    memory_of_dropped_tensors,
    wait_blocks_no_host,
    gradient_of_the_whole_batch,
    amp_bf16,
    amp_fp16,
    sync_batch_norm,
)

if __name__ == "__main__":
    main()
