"""Checks that all ranks still have the same weights, and repairs those that do not."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

import torch

from kaitian_mpi.engine.state import TrainingState
from kaitian_mpi.metrics.sink import Sinks
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.output.console import warn_rank_0

_COLUMNS = 61  # a prime, so that data shifted by a power of two changes the sums
_MAX_ROWS = 1 << 16  # 32 MB


def repair_divergence(world: World, state: TrainingState, sinks: Sinks | None = None) -> list[int]:
    """Copy a healthy rank's weights to the ranks whose weights differ. Collective.

    Ranks apply the same gradients in the same way, so they differ only because of a fault: broken
    memory, a nondeterministic kernel, or code that changes weights on some ranks only. The weights
    that most ranks have are taken as right; with equal numbers, those of the lowest rank.

    Args:
        world: the ranks.
        state: of this rank.
        sinks: take the event, if there is one.

    Returns:
        The world ranks that differed.
    """
    fingerprints = gather_values(world.comm, fingerprint(state))
    healthy, different = split_by_majority(fingerprints)
    if not different:
        return []
    names = ", ".join(str(world.infos[rank]) for rank in different)
    step = state.progress.step
    text = (
        f"step {step}: the weights of {names} differ from the others'; copied from "
        f"{world.infos[healthy]}"
    )
    warn_rank_0(world, text)
    state.copy_from(world, healthy, different)
    repaired = [world.infos[rank].world_rank for rank in different]
    if sinks is not None:
        sinks.event("divergence", step, text, repaired)
    return repaired


def split_by_majority(values: Sequence[int]) -> tuple[int, list[int]]:
    """Return the first rank with the most frequent value, and the ranks with another value."""
    counts = Counter(values)
    most = max(counts.values())
    healthy = next(rank for rank, value in enumerate(values) if counts[value] == most)
    return healthy, [rank for rank, value in enumerate(values) if value != values[healthy]]


def fingerprint(state: TrainingState) -> int:
    """Return a checksum of the weights and the optimizer's state, for bitwise comparison.

    The tensors' bits are summed as integers on their device; then the sums are hashed.
    """
    tensors = [parameter.detach() for parameter in state.model.parameters()]
    for optimizer in state.optimizers:
        for of_parameter in optimizer.state.values():
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
    # In pieces, for on CPUs each is copied as integers of 64 bits.
    sums = (piece.sum(0, dtype=torch.int64) for piece in body.split(_MAX_ROWS))
    return torch.cat([sum(sums, bits.new_zeros(_COLUMNS, dtype=torch.int64)), rest])
