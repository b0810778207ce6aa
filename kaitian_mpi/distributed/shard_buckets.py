"""Buckets of gradients or values in the order of their owners, with parts of different lengths.

A vendor's library exchanges parts of equal lengths in place. For other parts it makes a broadcast
or a reduction for each rank, and it copies a list of tensors (NCCL: `ProcessGroupNCCL::allgather`,
`newLikeFlat`); so parts of nearly equal lengths are padded, if a bucket has a buffer anyway.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi.balance.ownership import NO_MIRROR, Part
from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.collectives.torch_releases import all_gather_into, reduce_scatter_from
from kaitian_mpi.distributed.gradients import check_dense

MAX_PADDED = 1.125
"""Up to how many times its elements a bucket's buffer has with padding."""


class BufferPool:
    """Buffers for buckets in flight, which are reused: so memory is not fragmented."""

    def __init__(self, limit: int) -> None:
        """Keep at most `limit` buffers of each dtype and device."""
        self._limit = limit
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}

    def prepare(self, buckets: Sequence[ShardBucket]) -> None:
        """Allocate as many buffers as are used at once, for the largest buckets that need one."""
        for bucket in sorted(buckets, key=lambda bucket: bucket.length, reverse=True):
            free = self._free.get((bucket.own.dtype, bucket.own.device), [])
            if not bucket.is_whole and len(free) < self._limit:
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
        if len(free) < self._limit:
            free.append(whole)


class ShardBucket:
    """The parts of some parameters of one dtype and device, in the order of their owners."""

    def __init__(
        self,
        parameters: Mapping[int, nn.Parameter],
        parts: Sequence[Part],
        size: int,
        rank: int,
        is_sharded: bool = False,
        pads: bool = False,
    ) -> None:
        """Lay out `parts`, by rank of `size`; `parameters` are by the number in a part.

        If `is_sharded`, only the owners have the parameters' values, which are contiguous. If
        `pads`, which is for a vendor's library, parts of nearly one length are padded.
        """
        self.rank = rank
        self.is_sharded = is_sharded
        self.parts = sorted(parts, key=lambda part: (part.owner, part.mirror))
        self.parameters = [*parameters.values()]
        self._parameters = [parameters[part.parameter] for part in self.parts]
        only = self._parameters[0]
        self.is_whole = len(parameters) == 1 and (is_sharded or only.is_contiguous())
        """Whether a gradient or a parameter has the memory of the bucket."""
        rows = self._rows_on_meta()
        owned = [0] * size  # elements of each rank's parts
        mirrored = 0  # elements of the parts that this rank mirrors
        for part, layout in zip(self.parts, rows, strict=True):
            owned[part.owner] += layout.numel()
            mirrored += layout.numel() * (part.mirror == rank)
        self._lengths = self._padded(owned) if pads else owned
        """Elements of the ranks' parts in a buffer, with padding."""
        self._is_even = len({*self._lengths}) == 1 and pads
        self._layouts = []
        ends = dict(enumerate(itertools.accumulate([0, *self._lengths])))
        for part, layout in zip(self.parts, rows, strict=True):
            self._layouts.append((layout.shape, layout.stride(), ends[part.owner]))
            ends[part.owner] += layout.numel()
        self._like = next(iter(parameters.values())).detach().new_empty(0)
        self.padded = self._like.new_empty(self._lengths[rank])
        """Has `own`, and the padding."""
        self.own = self.padded[: owned[rank]]
        """The sum of this rank's parts; flat."""
        self.copy = self._like.new_empty(mirrored)
        """The sums of the parts that it mirrors; flat."""
        self.gradients = self._views(self.own, rows, "owner") | self._views(
            self.copy, rows, "mirror"
        )
        """The same two by part, in the parameters' layout."""

    def _rows_on_meta(self) -> list[torch.Tensor]:
        """Return the shape and the strides of each part's rows in a buffer, without values."""
        pairs = zip(self._parameters, self.parts, strict=True)
        rows = [torch.empty_like(rows_of_part(*pair), device="meta") for pair in pairs]
        return [layout.contiguous() for layout in rows] if self.is_sharded else rows

    def _padded(self, owned: list[int]) -> list[int]:
        """Return the ranks' lengths with padding, if it adds little to a buffer."""
        longest = max(owned)
        padded = len(owned) * longest
        most = 1.0 if self.is_whole else MAX_PADDED  # it has the memory of a parameter
        return [longest] * len(owned) if padded <= most * sum(owned) else owned

    def _views(
        self, buffer: torch.Tensor, rows: Sequence[torch.Tensor], role: str
    ) -> dict[Part, torch.Tensor]:
        """Return the rows in a buffer of the parts in which this rank has a role."""
        views: dict[Part, torch.Tensor] = {}
        start = 0
        for part, layout in zip(self.parts, rows, strict=True):
            if getattr(part, role) == self.rank:
                views[part] = buffer.as_strided(layout.shape, layout.stride(), start)
                start += layout.numel()
        return views

    def _placed(self, buffer: torch.Tensor, *, are_own: bool) -> tuple[list[Any], list[Any]]:
        """Return the places in a buffer of this rank's parts, or of the others', and their rows."""
        places: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        for part, parameter, layout in zip(
            self.parts, self._parameters, self._layouts, strict=True
        ):
            if (part.owner == self.rank) == are_own:
                places.append(buffer.as_strided(*layout))
                rows.append(rows_of_part(parameter, part))
        return places, rows

    @property
    def length(self) -> int:
        return sum(self._lengths)

    @torch.no_grad()
    def fill(self, weight: float | None, pool: BufferPool) -> torch.Tensor:
        """Return the weighted gradients in a buffer, and free the parameters' own."""
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        check_dense(gradients)
        first = gradients[0]
        if weight and self.is_whole and first is not None and first.is_contiguous():
            return first.view(-1).mul_(weight)  # it is laid out as the buffer would be
        # As `release` gives back none of a bucket that is whole, it takes none of them either.
        length = self.length
        buffer = self._like.new_empty(length) if self.is_whole else pool.take(self._like, length)
        if not weight:
            return buffer.zero_()
        is_on_host = device_of(buffer.device).is_host
        views: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        for part, layout, gradient in zip(self.parts, self._layouts, gradients, strict=True):
            view = buffer.as_strided(*layout)
            if gradient is None:
                view.zero_()
            elif is_on_host:  # in one pass over the memory
                torch.mul(rows_of_part(gradient, part), weight, out=view)
            else:
                views.append(view)
                rows.append(rows_of_part(gradient, part))
        if rows:  # by two kernels
            torch._foreach_copy_(views, rows)
            buffer.mul_(weight)
        return buffer

    @torch.no_grad()
    def values(self, pool: BufferPool) -> torch.Tensor:
        """Return a buffer with this rank's parts of the parameters; the others' are undefined."""
        if self.is_whole:
            parameter = self._parameters[0]
            parameter.data = parameter.data.contiguous()  # a script may have set another layout
            return parameter.detach().view(-1)
        buffer = pool.take(self._like, self.length)
        places, rows = self._placed(buffer, are_own=True)
        if places:
            torch._foreach_copy_(places, rows)
        return buffer

    @torch.no_grad()
    def store(self, buffer: torch.Tensor) -> None:
        """Set the other ranks' parts of the parameters from a buffer."""
        if self.is_whole:
            return
        places, rows = self._placed(buffer, are_own=False)
        if places:
            torch._foreach_copy_(rows, places)

    def release(self, buffer: torch.Tensor, pool: BufferPool) -> None:
        """Give back a buffer of this bucket that is no longer used."""
        if not self.is_whole:
            pool.give(buffer)

    def make_plain(self, pending_class: type[nn.Parameter]) -> None:
        """Make parameters of this class plain ones again."""
        for parameter in self.parameters:
            if type(parameter) is pending_class:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]

    def start_gather(self, buffer: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
        """Start to give every rank the owners' parts of a buffer; return the work. Collective."""
        pieces = list(buffer.split(self._lengths))
        if self._is_even:
            return all_gather_into(buffer, pieces[self.rank], group=group, async_op=True)
        return dist.all_gather(pieces, pieces[self.rank], group=group, async_op=True)

    def start_sum(
        self, arriving: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup | None
    ) -> Any:
        """Start to sum this rank's parts of all buffers into a tensor like `padded`. Collective."""
        if self._is_even:
            return reduce_scatter_from(arriving, buffer, group=group, async_op=True)
        pieces = list(buffer.split(self._lengths))
        return dist.reduce_scatter(arriving, pieces, group=group, async_op=True)

    def start_mirroring(self, group: dist.ProcessGroup | None) -> Any:
        """Start to send the sums of this rank's parts to their mirrors. Collective.

        Returns:
            The work, after which `copy` has the sums of the parts that this rank mirrors.
        """
        sent = [0] * len(self._lengths)
        received = [0] * len(self._lengths)
        for part, gradient in self.gradients.items():
            if part.owner == self.rank:
                sent[part.mirror] += gradient.numel()
            else:
                received[part.owner] += gradient.numel()
        # By messages: after a loss, MPI's own all-to-all may leave one that ends the job.
        arriving, pieces = list(self.copy.split(received)), list(self.own.split(sent))
        return dist.all_to_all(arriving, pieces, group=group, async_op=True)

    @property
    def has_mirrors(self) -> bool:
        return any(part.mirror != NO_MIRROR for part in self.parts)


def rows_of_part(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """Return a view of the rows of a parameter, or its gradient, that a part has."""
    tensor = tensor.detach()
    return tensor[part.begin : part.end] if tensor.dim() else tensor
