"""Gradients in flat buffers: which parameters share one, how they get in and out, and their sums.

The sums are over the ranks of a group of any backend; ours has methods of its own for two of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kaitian_mpi.errors import UserError

if TYPE_CHECKING:
    from kaitian_mpi.distributed.residual import Residual

# From this many elements on, a call that scales and copies at once pays for itself; smaller
# gradients are copied together and then scaled together.
_LARGE = 1 << 14

Key = tuple[torch.dtype, torch.device]


class Bucket:
    """The gradients of some parameters, of one dtype and on one device, in one buffer.

    After the gradients, the buffer has a number for each parameter: from how many ranks it got a
    gradient. So the sum over the ranks also says which parameters no rank has used. The last number
    is the caller's, whose weighted sum so costs no collective of its own.
    """

    def __init__(self, parameters: Mapping[int, torch.nn.Parameter]) -> None:
        self.indices = sorted(parameters, key=lambda index: parameters[index].numel() < _LARGE)
        """The parameters' indices in the buffer's order: the large ones first."""
        self._parameters = [parameters[index] for index in self.indices]
        self._large = sum(parameter.numel() >= _LARGE for parameter in self._parameters)
        sizes = [parameter.numel() for parameter in self._parameters]
        first = self._parameters[0].detach()
        reals = 2 if first.is_complex() else 1
        real = torch.view_as_real(first) if first.is_complex() else first
        end = sum(sizes) * reals
        self.buffer = real.new_empty(end + len(sizes) + 1)
        self.gradients = self.buffer[:-1]
        """The buffer without the caller's number."""
        self.number = self.buffer[-1]
        """The number that `fill` was given, without dimensions."""
        self._used = self.buffer[end:-1]
        values = self.buffer[:end]
        if first.is_complex():
            values = torch.view_as_complex(values.view(-1, 2))
        self._small = values[sum(sizes[: self._large]) :]
        self._views: list[torch.Tensor] = []
        self.places: dict[int, slice] = {}
        """The place of each parameter's gradient in the buffer, by index."""
        offset = 0
        for index, parameter, size in zip(self.indices, self._parameters, sizes, strict=True):
            self.places[index] = slice(offset * reals, (offset + size) * reals)
            # The strides that autograd gives to a gradient of its own.
            strides = torch.empty_like(parameter.detach(), device="meta").stride()
            self._views.append(values.as_strided(parameter.shape, strides, offset))
            offset += size
        self._undecided: list[int] = []
        self.residual: Residual | None = None
        """The format in which the gradients cross slow links; None if they cross as they are."""

    def use_residual(self, residual: Residual | None) -> None:
        """Let the gradients cross slow links in a residual's format."""
        self.residual = residual

    @torch.no_grad()
    def fill(self, weight: float | None, number: torch.Tensor | None = None) -> None:
        """Write the weighted gradients to the buffer, of which the parameters' become views.

        With a weight of 0 they are zero, whatever autograd has computed: not even a NaN is left.
        With None, this rank has no gradients. `number` is of one element; None counts as 0.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        if not weight:
            self.buffer.zero_()
            if weight is not None:
                self._used.copy_(torch.tensor([float(grad is not None) for grad in gradients]))
            self._undecided = list(range(len(self._views)))
            return
        self._undecided = [place for place, grad in enumerate(gradients) if grad is None]
        if self._undecided:
            self._used.copy_(torch.tensor([float(grad is not None) for grad in gradients]))
            for place in self._undecided:
                gradients[place] = self._views[place].zero_()
        else:
            self._used.fill_(1.0)
        if number is None:
            self.number.zero_()
        else:
            self.number.copy_(number.view(())).mul_(weight)
        try:
            self._write(gradients, weight)  # type: ignore[arg-type]
        except RuntimeError:
            check_dense(gradients)
            raise
        # What autograd has allocated is free from here on.
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def settle(self) -> None:
        """After the sum, set the gradients of parameters that this rank has not used.

        They get the other ranks' sum; or None if no rank has used them.
        """
        if not self._undecided:
            return  # and so an accelerator need not be waited for
        ranks = self._used.cpu().tolist()
        for place in self._undecided:
            self._parameters[place].grad = self._views[place] if ranks[place] > 0 else None

    def _write(self, gradients: list[torch.Tensor], weight: float) -> None:
        large = self._large
        for gradient, view in zip(gradients[:large], self._views[:large], strict=True):
            torch.mul(gradient, weight, out=view)
        if large < len(gradients):
            torch._foreach_copy_(self._views[large:], gradients[large:])
            self._small.mul_(weight)


def group_into_buckets(
    parameters: list[torch.nn.Parameter], caps: tuple[int, int]
) -> list[list[int]]:
    """Cut parameters into buckets by their indices, from the last one to the first.

    `caps` are bytes at which a bucket is full: the first of a dtype and device, and the others.
    """
    full: list[list[int]] = []
    open_: dict[Key, list[int]] = {}
    sizes: dict[Key, int] = {}
    limits: dict[Key, int] = {}
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        key = parameter.dtype, parameter.device
        open_.setdefault(key, []).append(index)
        sizes[key] = sizes.get(key, 0) + parameter.numel() * parameter.element_size()
        if sizes[key] >= limits.get(key, caps[0]):
            full.append(open_.pop(key))
            sizes[key] = 0
            limits[key] = caps[1]
    return sorted([*full, *open_.values()], key=lambda bucket: -bucket[-1])


def finite_and_norm(gradients: Sequence[torch.Tensor]) -> tuple[bool, float]:
    """Return whether gradients have no NaN and no infinity, and their squared norm. Not collective.

    float16 and bfloat16 are added up in float32. The host waits for each device once.
    """
    by_form: dict[Key, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            by_form.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for (dtype, device), alike in by_form.items():
        wide = torch.promote_types(dtype, torch.float32)
        by_device.setdefault(device, []).extend(torch._foreach_norm(alike, 2, wide))
    norms = [norm for device_norms in by_device.values() for norm in values_of(device_norms)]
    # Finite numbers may add up to more than a float can hold.
    is_finite = math.isfinite(sum(norms)) or all(bool(g.isfinite().all()) for g in gradients)
    return is_finite, sum(norm * norm for norm in norms)


def values_of(numbers: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of tensors of one element on one device, waiting for it once."""
    if not numbers:
        return []
    widest = functools.reduce(torch.promote_types, (number.dtype for number in numbers))
    alike = [number.reshape(()).to(widest) for number in numbers]
    return torch.stack(alike).cpu().tolist()  # type: ignore[no-any-return]


def uses_library(group: dist.ProcessGroup | None) -> bool:
    """Return whether a vendor's library connects a group's ranks, of any backend; None: all."""
    chosen: Any = group or dist.group.WORLD
    return bool(getattr(chosen, "uses_library", False))


def is_broken(group: dist.ProcessGroup) -> bool:
    """Return whether a group, of any backend, knows that it has lost a rank."""
    ours: Any = group
    return bool(getattr(ours, "is_broken", False))


def sum_on_host(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> Any:
    """Start to sum a host tensor over a group's ranks, in place; return the work. Collective.

    `dist.all_reduce` would take it to the devices of a group that a vendor's library connects, and
    back.
    """
    chosen: Any = group or dist.group.WORLD
    if hasattr(chosen, "sum_on_host"):  # its class is not imported: that would start MPI
        return chosen.sum_on_host(tensor)
    return dist.all_reduce(tensor, group=chosen, async_op=True)


def sum_gradients(
    buffer: torch.Tensor,
    residual: Residual | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    in_background: bool = False,
) -> Any:
    """Sum a buffer of gradients over a group's ranks, in place. Collective.

    Between device kinds and hosts it may lose digits: see `--relay-dtype` and `--wire`. With a
    residual, the buffer has the same format on every rank. Returns the work; None if it is done.
    """
    chosen: Any = group or dist.group.WORLD
    if not hasattr(chosen, "sum_gradients"):
        return dist.all_reduce(buffer, group=chosen, async_op=in_background)
    work = chosen.sum_gradients(buffer, residual, in_background)
    if in_background:
        return work
    work.wait()
    return None


def gather_together(
    pieces: Sequence[Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    in_background: bool = False,
) -> list[Any]:
    """Gather each rank's `tensors[i]` into `pieces[i]`, by rank, with few messages. Collective.

    The tensors are contiguous. Returns the works; none if they are done.
    """
    chosen: Any = group or dist.group.WORLD
    if hasattr(chosen, "gather_together") and not uses_library(chosen):
        lists = [list(by_rank) for by_rank in pieces]
        works = [chosen.gather_together(lists, list(tensors), in_background)]
    else:
        works = [
            dist.all_gather(list(by_rank), tensor, group=chosen, async_op=True)
            for by_rank, tensor in zip(pieces, tensors, strict=True)
        ]
    if in_background:
        return works
    for work in works:
        work.wait()
    return []


class Fraction:
    """This rank's fraction of a total over the ranks, which it sums, collectively, if not given."""

    def __init__(
        self, amount: float, total: float | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        self._own = amount
        self._total = total
        if total is None:
            self._sum = torch.tensor(amount, dtype=torch.float64)
            self._work = sum_on_host(self._sum, group)

    @property
    def total(self) -> float:
        """The sum of all ranks' numbers; waits for it."""
        if self._total is None:
            self._work.wait()
            self._total = self._sum.item()
        return self._total

    def value(self) -> float:
        """Return the fraction; 0 if there is nothing in all. Waits for the sum."""
        return self._own / self.total if self.total else 0.0


def check_dense(gradients: Iterable[torch.Tensor | None]) -> None:
    """Raise a `UserError` if a gradient is sparse."""
    for gradient in gradients:
        if gradient is not None and gradient.layout is not torch.strided:
            raise UserError(
                f"a gradient has the layout {gradient.layout}; gradients must be dense: build the "
                "embedding with sparse=False"
            )
