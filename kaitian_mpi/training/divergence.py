"""Whether the ranks still hold the same weights."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

import torch

from kaitian_mpi.engine.state import TrainingState
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.output.console import say

_COLUMNS = 61  # a prime: what is copied to a wrong place by a power of two shows


def repair_divergence(world: World, state: TrainingState) -> list[int]:
    """Give a rank whose weights differ those of a healthy one. Collective.

    Ranks get the same gradients and do the same with them, so they differ only by a fault: broken
    memory, a kernel that is not deterministic, or code that changes weights on some ranks only.
    Right is what most ranks hold; of equally many, the lowest rank.

    Returns:
        The ranks that differed, by the numbers that MPI gave.
    """
    fingerprints = gather_values(world.comm, fingerprint(state))
    healthy, different = split_by_majority(fingerprints)
    if not different:
        return []
    names = ", ".join(str(world.infos[rank]) for rank in different)
    say(
        world,
        f"step {state.progress.step}: the weights of {names} differ from the others'; copied from "
        f"{world.infos[healthy]}",
    )
    state.take_from(world, healthy, different)
    return [world.infos[rank].world_rank for rank in different]


def split_by_majority(values: Sequence[int]) -> tuple[int, list[int]]:
    """Return the first rank with the most frequent value, and the ranks with another."""
    counts = Counter(values)
    most = max(counts.values())
    healthy = next(rank for rank, value in enumerate(values) if counts[value] == most)
    return healthy, [rank for rank, value in enumerate(values) if value != values[healthy]]


def fingerprint(state: TrainingState) -> int:
    """Return a number that is the same where weights and optimizer are the same, bit by bit.

    Sums of the tensors' bits as integers, where the tensors are, and a checksum of those sums.
    """
    tensors = [parameter.detach() for parameter in state.model.parameters()]
    for of_parameter in state.optimizer.state.values():
        tensors += [value for value in of_parameter.values() if isinstance(value, torch.Tensor)]
    checksum = 0
    for tensor in tensors:
        sums = _sums_of_bits(tensor).cpu().numpy().tobytes()
        checksum = zlib.crc32(sums, checksum)
    return checksum


def _sums_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().flatten()
    size = flat.element_size()
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[min(size, 8)]
    bits = flat.view(whole)
    body = bits[: bits.numel() // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    rest = bits[body.numel() :].to(torch.int64)
    return torch.cat([body.sum(0, dtype=torch.int64), rest])
