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

# What rounding may do. In 200 steps, CPUs of different instruction sets differ by up to 4e-7 in the
# norm, and by 5e-5 in an element that RMSprop once divided by almost nothing.
_COLUMNS = 61  # a prime, so that data shifted by a power of two changes the sums
_MAX_ROWS = 1 << 16  # 32 MB
_UNITS_PER_STEP = 4.0
_MOST = 0.2
_MOST_OF_ELEMENT = 0.02
# Of the coarsest operation, relative; accelerators multiply float32 in TF32 or the like.
_UNITS = {"fp32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
_HOST_UNIT = 2.0**-20  # of float32: sums of hundreds of products round more than one operation

Print = tuple[tuple[str, ...], int]
"""A rank's way of rounding, and the checksum of its tensors."""


def repair_divergence(world: World, state: State, sinks: Sinks) -> list[int]:
    """Make the weights and the optimizers' state the same again on all ranks. Collective.

    Ranks apply the same gradients. On identical devices the results are bit-identical, so they
    differ only because of a fault, such as bad memory, a nondeterministic kernel, or code that
    changes weights on some ranks only. Different devices round differently; what that has changed
    since the last check is repaired silently. What most ranks agree on is taken as right; with
    equal numbers, what the lowest rank has.
    """
    tensors = state.replicas()
    gathered = gather_values(world.comm, (fingerprint(tensors), len(tensors)))
    prints = [(info.rounding, bits) for info, (bits, _) in zip(world.infos, gathered, strict=True)]
    healthy, agreeing = 0, list(range(world.size))
    if len({bits for _, bits in prints}) > 1:
        counts = [count for _, count in gathered]
        healthy, agreeing = _find_majority(world, state, prints, counts)
    step = state.progress.step
    state.mark_equal()
    different = [rank for rank in range(world.size) if rank not in agreeing]
    if not different:
        return []
    names, source = ", ".join(str(world.infos[rank]) for rank in different), world.infos[healthy]
    text = f"step {step}: the weights of {names} differ from the others'; copied from {source}"
    warn_rank_0(world, text)
    copy_from(state, world, healthy, different)
    repaired = [world.infos[rank].world_rank for rank in different]
    sinks.event("divergence", step, text, repaired)
    return repaired


def _find_majority(
    world: World, state: State, prints: Sequence[Print], counts: Sequence[int]
) -> tuple[int, list[int]]:
    """Return a rank that most others agree with, and these with itself. Collective."""
    rank_print = prints[world.rank]
    kind, _ = rank_print
    best: tuple[int, list[int]] = 0, []
    for rank in by_frequency(prints):
        agrees = rank_print == prints[rank]
        if len({kind for kind, _ in prints}) > 1:
            receives = kind != prints[rank][0]
            fits = _take_rounding(world, state, rank, counts[rank], receives)
            agrees = agrees or fits
        votes = alike(prints, gather_values(world.comm, agrees))
        if len(votes) > len(best[1]):
            best = rank, votes
        if 2 * len(votes) > world.size:
            break
    return best


def alike(prints: Sequence[Print], agree: Sequence[bool]) -> list[int]:
    """Return the ranks that agree, except those that differ from most others of their kind."""
    ranks = [rank for rank, yes in enumerate(agree) if yes]
    bits: dict[tuple[str, ...], int] = {}
    for place in by_frequency([prints[rank] for rank in ranks]):
        bits.setdefault(*prints[ranks[place]])
    return [rank for rank in ranks if prints[rank][1] == bits[prints[rank][0]]]


def _take_rounding(world: World, state: State, source: int, count: int, receives: bool) -> bool:
    """Take over a rank's tensors, as far as only rounding tells this rank's from them. Collective.

    Nothing is lost if the source dies meanwhile, or turns out to be wrong in other tensors: either
    rounding is as good.
    """
    tensors = state.replicas()
    fits = receives and len(tensors) == count
    steps = state.progress.step - state.equal_at_step
    for index in range(count):
        mine = tensors[index] if world.rank == source else None
        other = broadcast_state(world.comm, mine, source, receives)  # one at a time
        fits = fits and differs_by_rounding(tensors[index], other, steps)
        if fits:
            with state.lock:
                tensors[index].copy_(other)
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
    tensor, other = numbers_of(tensor), numbers_of(other)
    odd = ~(tensor.isfinite() & other.isfinite())
    if not torch.equal(tensor[odd].nan_to_num(0.5), other[odd].nan_to_num(0.5)):
        return False
    size, change = other.masked_fill(odd, 0.0).abs(), (tensor - other).masked_fill(odd, 0.0).abs()
    mean = size.square().mean().sqrt()
    allowed = min(_MOST, _UNITS_PER_STEP * units.eps * (steps + 1))
    of_element = (allowed + _MOST_OF_ELEMENT) * (size + mean) + units.tiny
    norm_fits = change.square().mean().sqrt() <= allowed * mean + units.tiny
    return bool(norm_fits and (change <= of_element).all())


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
    """Return the first rank with each value: the most frequent first, or else the lowest rank."""
    return [values.index(value) for value, _ in Counter(values).most_common()]


def fingerprint(tensors: Sequence[torch.Tensor]) -> int:
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
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[min(size, 8)]
    bits = flat.view(whole)
    body = bits[: bits.numel() // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    rest = bits[body.numel() :].to(torch.int64)
    # In pieces, because CPUs copy each as integers of 64 bits.
    sums = (piece.sum(0, dtype=torch.int64) for piece in body.split(_MAX_ROWS))
    return torch.cat([sum(sums, bits.new_zeros(_COLUMNS, dtype=torch.int64)), rest])
