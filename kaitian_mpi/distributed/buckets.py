"""Gradients in flat buffers: which parameters share one, and how they get in and out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from kaitian_mpi.devices.protocol import Mark
from kaitian_mpi.distributed.residual import Residual
from kaitian_mpi.errors import UnsupportedError
from kaitian_mpi.runtime.watchdog import enter_phase

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
        """Allocate the buffer."""
        self.indices = sorted(parameters, key=lambda index: parameters[index].numel() < _LARGE)
        """Of the parameters, in the buffer's order: the large ones first."""
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
            _check_dense(gradients)
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


class ReadyMark:
    """Marks on the device when the gradients of a step's buckets are ready; called with each."""

    def __init__(self, mark: Callable[[], Mark], catch_up: Callable[[], None]) -> None:
        self._mark, self._catch_up = mark, catch_up
        self.step = 0
        """The number of the step."""
        self.last: Mark | None = None
        """The mark of the bucket that was ready last."""

    def __call__(self, is_last: bool) -> None:
        self._catch_up()
        self.last = self._mark()
        if is_last:
            enter_phase("the sum of gradients", step=self.step, waits=True)


def partition(parameters: list[torch.nn.Parameter], caps: tuple[int, int]) -> list[list[int]]:
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
            sizes[key], limits[key] = 0, caps[1]
    return sorted([*full, *open_.values()], key=lambda bucket: -bucket[-1])


def _check_dense(gradients: Iterable[torch.Tensor | None]) -> None:
    for gradient in gradients:
        if gradient is not None and gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"a gradient has the layout {gradient.layout}; gradients must be dense: build the "
                "embedding with sparse=False"
            )
