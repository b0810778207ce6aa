"""Buckets of gradients or values in the order of their owners, with parts of unlike lengths."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from kaitian_mpi.balance.ownership import NO_MIRROR, Part
from kaitian_mpi.distributed.gradients import check_dense


class Spares:
    """Memory for buckets that are under way, used again and again: so it is not fragmented."""

    def __init__(self, most: int) -> None:
        """Keep at most so many buffers of each dtype and device."""
        self._most = most
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}

    def prepare(self, buckets: Sequence[ShardBucket]) -> None:
        """Allocate as many buffers as are used at once, for the largest buckets that need one."""
        for bucket in sorted(buckets, key=lambda bucket: bucket.length, reverse=True):
            free = self._free.get((bucket.own.dtype, bucket.own.device), [])
            if not bucket.is_whole and len(free) < self._most:
                self.give(bucket.own.new_empty(bucket.length))

    def take(self, like: torch.Tensor, length: int) -> torch.Tensor:
        """Return a flat buffer of this length."""
        free = self._free.get((like.dtype, like.device), [])
        fits = [place for place, buffer in enumerate(free) if length <= buffer.numel()]
        if not fits:
            return like.new_empty(length)
        return free.pop(min(fits, key=lambda place: free[place].numel()))[:length]

    def give(self, buffer: torch.Tensor) -> None:
        """Take back what is no longer used."""
        whole = buffer if buffer._base is None else buffer._base
        free = self._free.setdefault((buffer.dtype, buffer.device), [])
        if len(free) < self._most:
            free.append(whole)


class ShardBucket:
    """The parts of some parameters of one dtype and device, in the order of their owners."""

    def __init__(
        self,
        parameters: Mapping[int, nn.Parameter],
        parts: Sequence[Part],
        size: int,
        rank: int,
        is_parted: bool = False,
    ) -> None:
        """Lay out `parts`, by rank of `size`; `parameters` are by the number in a part.

        If `is_parted`, only the owners have the parameters' values, which are contiguous.
        """
        self.parts = sorted(parts, key=lambda part: (part.owner, part.mirror))
        self.parameters = [*parameters.values()]
        self._parameters = [parameters[part.parameter] for part in self.parts]
        self._like = next(iter(parameters.values())).detach().new_empty(0)
        pairs = zip(self._parameters, self.parts, strict=True)
        rows = [torch.empty_like(_rows(*pair), device="meta") for pair in pairs]
        rows = [each.contiguous() if is_parted else each for each in rows]
        sizes = [each.numel() for each in rows]
        self._starts = [0, *itertools.accumulate(sizes)]
        layouts = zip(rows, self._starts, strict=False)
        self._layouts = [(each.shape, each.stride(), start) for each, start in layouts]
        self.counts, self.rank = [0] * size, rank
        self.mirrors, self.mirrored = [0] * size, [0] * size
        """Elements of this rank's parts by mirror, and of those that it mirrors by owner."""
        for part, count in zip(self.parts, sizes, strict=True):
            self.counts[part.owner] += count
            if part.owner == rank and part.mirror != NO_MIRROR:
                self.mirrors[part.mirror] += count
            elif part.mirror == rank:
                self.mirrored[part.owner] += count
        self.own = self._like.new_empty(self.counts[rank])
        """The sum of this rank's parts; flat."""
        self.copy = self._like.new_empty(sum(self.mirrored))
        """The sums of the parts that it mirrors; flat."""
        self.gradients: dict[Part, torch.Tensor] = {}
        """The same two by part, in the parameters' layout."""
        for buffer, has in ((self.own, "owner"), (self.copy, "mirror")):
            start = 0
            for part, layout in zip(self.parts, rows, strict=True):
                if getattr(part, has) == rank:
                    shape, stride = layout.shape, layout.stride()
                    self.gradients[part] = buffer.as_strided(shape, stride, start)
                    start += layout.numel()
        only = self._parameters[0]
        self.is_whole = len(parameters) == 1 and (is_parted or only.is_contiguous())
        """Whether a gradient or a parameter has the memory of the bucket."""
        self.is_parted = is_parted

    def _placed(self, buffer: torch.Tensor) -> Any:
        """Yield each part, its parameter, and its place in a buffer, in the parameter's layout."""
        for part, parameter, layout in zip(
            self.parts, self._parameters, self._layouts, strict=True
        ):
            yield part, parameter, buffer.as_strided(*layout)

    @property
    def length(self) -> int:
        return self._starts[-1]

    @torch.no_grad()
    def fill(self, weight: float | None, spares: Spares) -> torch.Tensor:
        """Return the weighted gradients in a buffer, and free the parameters' own."""
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        check_dense(gradients)
        first = gradients[0]
        if weight and self.is_whole and first is not None and first.is_contiguous():
            return first.view(-1).mul_(weight)  # it is laid out as the buffer would be
        buffer = spares.take(self._like, self.length)
        if not weight:
            return buffer.zero_()
        for (part, _, view), gradient in zip(self._placed(buffer), gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                torch.mul(_rows(gradient, part), weight, out=view)
        return buffer

    @torch.no_grad()
    def values(self, spares: Spares) -> torch.Tensor:
        """Return a buffer with this rank's parts of the parameters; the others' are undefined."""
        if self.is_whole:
            parameter = self._parameters[0]
            parameter.data = parameter.data.contiguous()  # a script may have set another layout
            return parameter.detach().view(-1)
        buffer = spares.take(self._like, self.length)
        for part, parameter, view in self._placed(buffer):
            if part.owner == self.rank:
                view.copy_(_rows(parameter, part))
        return buffer

    @torch.no_grad()
    def take(self, buffer: torch.Tensor) -> None:
        """Set the other ranks' parts of the parameters."""
        if self.is_whole:
            return
        for part, parameter, view in self._placed(buffer):
            if part.owner != self.rank:
                _rows(parameter, part).copy_(view)

    def settle(self, late: type[nn.Parameter]) -> None:
        """Make parameters of this class plain ones again."""
        for parameter in self.parameters:
            if type(parameter) is late:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]

    def split(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the owners' parts of a buffer, by rank."""
        return list(buffer.split(self.counts))

    @property
    def has_mirrors(self) -> bool:
        return any(part.mirror != NO_MIRROR for part in self.parts)


def _rows(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor[part.begin : part.end] if tensor.dim() else tensor
