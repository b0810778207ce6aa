"""Checks that all ranks still have the same weights, and repairs those that do not."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import warn_rank_0
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.train.state import State, copy_from
from kaitian_mpi.train.state_transfer import broadcast_state

# A checksum adds up the rows of a matrix of so many columns.
_COLUMNS = 61  # a prime, so that data shifted by a power of two changes the sums
_MAX_ROWS = 1 << 16  # to add up at a time: 32 MB
# The most that rounding may change: of a tensor's norm, by step and in all, and of an element. In
# 200 steps, CPUs of different instruction sets differ by up to 4e-7 in the norm, and by 5e-5 in an
# element that RMSprop once divided by almost nothing.
_UNITS_PER_STEP = 4.0
_MAX_NORM_CHANGE = 0.2
_MAX_ELEMENT_CHANGE = 0.02
# The relative error of the coarsest operation: accelerators multiply float32 in TF32 or the like.
_UNITS = {"fp32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
_HOST_UNIT = 2.0**-20  # float32 on a host: sums of hundreds of products round more than once

RankChecksum = tuple[tuple[str, ...], int]
"""How a rank rounds (`RankInfo.rounding`), and the checksum of its tensors."""


def repair_divergence(world: World, state: State, sinks: Sinks) -> list[int]:
    """Make the weights and the optimizers' state the same again on all ranks. Collective.

    Ranks apply the same gradients. On identical devices the results are bit-identical, so they
    differ only because of a fault, such as bad memory, a nondeterministic kernel, or code that
    changes weights on some ranks only. Different devices round differently; the differences by
    rounding since the last check are repaired without a message. The state of the majority is taken
    as right; with equal numbers, that of the lowest rank.

    Returns:
        The world ranks that were repaired.
    """
    tensors = state.replicas()
    gathered = gather_values(world.comm, (checksum_of(tensors), len(tensors)))
    checksums = [checksum for checksum, _ in gathered]
    counts = [count for _, count in gathered]
    healthy = 0
    agreeing = list(range(world.size))
    if len(set(checksums)) > 1:
        rounding = [info.rounding for info in world.infos]
        rank_checksums = list(zip(rounding, checksums, strict=True))
        healthy, agreeing = _find_majority(world, state, rank_checksums, counts)
    step = state.progress.step
    state.mark_equal()
    different = [rank for rank in range(world.size) if rank not in agreeing]
    if not different:
        return []
    names = ", ".join(str(world.infos[rank]) for rank in different)
    source = world.infos[healthy]
    text = f"step {step}: the weights of {names} differ from the others'; copied from {source}"
    warn_rank_0(world, text)
    copy_from(state, world, healthy, different)
    repaired = [world.infos[rank].world_rank for rank in different]
    sinks.event("divergence", step, text, repaired)
    return repaired


def _find_majority(
    world: World, state: State, rank_checksums: Sequence[RankChecksum], counts: Sequence[int]
) -> tuple[int, list[int]]:
    """Return the rank with which most ranks agree, and all that do, itself too. Collective.

    `counts` are the ranks' numbers of tensors.
    """
    rounding, _ = rank_checksums[world.rank]
    is_mixed = len({rounding for rounding, _ in rank_checksums}) > 1
    best: tuple[int, list[int]] = 0, []
    for rank in by_frequency(rank_checksums):
        agrees = rank_checksums[world.rank] == rank_checksums[rank]
        if is_mixed:
            receives = rounding != rank_checksums[rank][0]
            fits = _take_rounding(world, state, rank, counts[rank], receives)
            agrees = agrees or fits
        votes = without_outliers(rank_checksums, gather_values(world.comm, agrees))
        if len(votes) > len(best[1]):
            best = rank, votes
        if 2 * len(votes) > world.size:
            break
    return best


def without_outliers(rank_checksums: Sequence[RankChecksum], agree: Sequence[bool]) -> list[int]:
    """Return the ranks that agree, except those that differ from most that round alike."""
    ranks = [rank for rank, agrees in enumerate(agree) if agrees]
    usual: dict[tuple[str, ...], int] = {}  # by rounding, the most frequent checksum
    for index in by_frequency([rank_checksums[rank] for rank in ranks]):
        rounding, checksum = rank_checksums[ranks[index]]
        usual.setdefault(rounding, checksum)
    return [rank for rank in ranks if rank_checksums[rank][1] == usual[rank_checksums[rank][0]]]


def _take_rounding(world: World, state: State, source: int, count: int, receives: bool) -> bool:
    """Take over a rank's tensors while they differ from this rank's by rounding only. Collective.

    Nothing is lost if the source dies meanwhile, or turns out to be wrong in later tensors: both
    roundings are equally good.

    Returns:
        Whether all tensors differ by rounding only; False if this rank does not receive.
    """
    tensors = state.replicas()
    fits = receives and len(tensors) == count
    steps = state.progress.step - state.equal_at_step
    for index in range(count):
        # One at a time, which takes memory for one tensor only.
        sent = tensors[index] if world.rank == source else None
        received = broadcast_state(world.comm, sent, source, receives)
        fits = fits and differs_by_rounding(tensors[index], received, steps)
        if fits:
            with state.lock:
                tensors[index].copy_(received)
    return fits


@torch.no_grad()
def differs_by_rounding(tensor: torch.Tensor, other: torch.Tensor, steps: int) -> bool:
    """Return whether rounding explains how a tensor differs from that of another device."""
    tensor = tensor.cpu()
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    if torch.equal(tensor, other) or not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.equal(tensor, other)
    units = torch.finfo(tensor.dtype)
    tensor = numbers_of(tensor)
    other = numbers_of(other)
    is_odd = ~(tensor.isfinite() & other.isfinite())
    if not torch.equal(tensor[is_odd].nan_to_num(0.5), other[is_odd].nan_to_num(0.5)):
        return False
    size = other.masked_fill(is_odd, 0.0).abs()
    change = (tensor - other).masked_fill(is_odd, 0.0).abs()
    root_mean_square = size.square().mean().sqrt()
    allowed = min(_MAX_NORM_CHANGE, _UNITS_PER_STEP * units.eps * (steps + 1))
    allowed_change = (allowed + _MAX_ELEMENT_CHANGE) * (size + root_mean_square) + units.tiny
    norm_fits = change.square().mean().sqrt() <= allowed * root_mean_square + units.tiny
    return bool(norm_fits and (change <= allowed_change).all())


def rounding_unit(model: nn.Module, precision: str, is_host: bool) -> float:
    """Return the relative error of a rank's coarsest operation, such as 2^-20 in float32."""
    units = [_HOST_UNIT if is_host and precision == "fp32" else _UNITS[precision]]
    if torch.get_float32_matmul_precision() != "highest":
        units.append(_UNITS["bf16"])
    units += [torch.finfo(p.dtype).eps / 2 for p in model.parameters() if p.is_floating_point()]
    return max(units)


def numbers_of(tensor: torch.Tensor, stride: int = 1) -> torch.Tensor:
    """Return a tensor's numbers, or each `stride`-th: flat, float64, in host memory."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.to_dense()
    parts = torch.view_as_real(dense) if dense.is_complex() else dense
    return parts.flatten()[::stride].cpu().double()


def by_frequency(values: Sequence[object]) -> list[int]:
    """Return the first rank with each value: the most frequent value first, then by rank."""
    return [values.index(value) for value, _ in Counter(values).most_common()]


def checksum_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return a checksum of some tensors, for bitwise comparison.

    Their bits are summed as integers on their device, so that little is copied to the host.
    """
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(_sums_of_bits(tensor.detach()).cpu().numpy().tobytes(), checksum)
    return checksum


def _sums_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().flatten()
    size = flat.element_size()
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[min(size, 8)]
    bits = flat.view(integer)
    matrix = bits[: bits.numel() // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    remainder = bits[matrix.numel() :].to(torch.int64)
    # In pieces, because a CPU copies a piece as integers of 64 bits to add it up.
    sums = (piece.sum(0, dtype=torch.int64) for piece in matrix.split(_MAX_ROWS))
    return torch.cat([sum(sums, bits.new_zeros(_COLUMNS, dtype=torch.int64)), remainder])
