"""What stands in `.grad` when a gradient's sum is with the ranks that own it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from kaitian_mpi.distributed import device_types
from kaitian_mpi.errors import UserError

Rows = Callable[[], Sequence[torch.Tensor]]
"""Returns this rank's rows of a gradient; none if other ranks own all of them."""

# What a module, or an optimizer that clears gradients, does to a gradient without reading it.
_ABOUT = {
    *("detach_", "requires_grad_", "numel", "nelement", "size", "dim", "ndimension", "stride"),
    *("is_contiguous", "is_floating_point", "is_complex", "element_size", "__hash__", "__len__"),
    *("get_device", "is_meta", "storage_offset", "_has_compatible_shallow_copy_type"),
}
_READS = {getattr(torch.Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real")}
# These change each element by itself, so each owner can change its rows.
_IN_PLACE = {"zero_", "mul_", "div_", "clamp_", "nan_to_num_"}
_IN_PLACE_OF_LISTS = {"_foreach_zero_", "_foreach_mul_", "_foreach_div_"}


class RemoteGradient(torch.Tensor):
    """A gradient with a shape, dtype and device, whose values are with their owners.

    It takes the memory of one number. `None` in its place means that the script has cleared the
    gradient. It can be set to zero, and multiplied or divided by a number, as this changes each
    owner's rows alike.
    """

    rows: Rows
    """This rank's rows of the sum."""

    @staticmethod
    def of(parameter: torch.Tensor, rows: Rows) -> RemoteGradient:
        """Return what stands in the `.grad` of a parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            number = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
            # Of the layout that `.grad` must have: all elements are the one number.
            gradient = torch.Tensor._make_subclass(RemoteGradient, number.expand(parameter.shape))
        gradient.rows = rows
        return gradient

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _IN_PLACE and _is_plain(args[1:], kwargs):
            for rows in args[0].rows():
                getattr(rows, name)(*args[1:], **kwargs)
            return args[0]
        if name in _IN_PLACE_OF_LISTS and _is_plain(args[1:], kwargs):
            rows = [*_rows_of(args[0])]
            if rows:
                func(rows, *args[1:], **kwargs)
            return None
        if name in {"to", *device_types()}:  # as `Module.to` and `Module.cpu` do
            with torch._C.DisableTorchFunctionSubclass():
                moved = func(args[0].as_subclass(torch.Tensor), *args[1:], **kwargs)
            return RemoteGradient.of(moved, args[0].rows)
        is_about = name in _ABOUT or (name in ("__get__", "__set__") and func not in _READS)
        if not is_about:
            raise UserError(
                f"--layout shard: a gradient is with the ranks that own it and cannot be read from "
                f".grad ({name}); use torch.nn.utils.clip_grad_norm_ or get_total_norm"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"RemoteGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> RemoteGradient:
        return RemoteGradient.of(self, self.rows)


class RemoteGradients:
    """What stands in the `.grad` of a model's parameters, and what the script has done to it."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], rows_of: Callable[[int], Sequence[torch.Tensor]]
    ) -> None:
        """Let nothing stand there yet.

        Args:
            parameters: those of the model, by their numbers.
            rows_of: returns this rank's rows of the sum of a parameter's gradient.
        """
        self._parameters = parameters
        self._rows_of = rows_of
        self._gradients: dict[int, RemoteGradient] = {}  # those that the script has not cleared

    def show(self, numbers: Collection[int]) -> None:
        """Let a gradient stand in the `.grad` of these parameters."""
        with torch._C.DisableTorchFunctionSubclass():
            for number in numbers:
                self._parameters[number].grad = self._gradient(number)

    def hide(self, numbers: Collection[int]) -> None:
        """Let none stand there, until it is shown again."""
        with torch._C.DisableTorchFunctionSubclass():
            for number in numbers:
                if isinstance(self._parameters[number].grad, RemoteGradient):
                    self._parameters[number].grad = None

    def kept(self) -> set[int]:
        """Return the numbers of the parameters whose gradient the script has not cleared."""
        with torch._C.DisableTorchFunctionSubclass():
            return {n for n, p in enumerate(self._parameters) if p.grad is not None}

    def cleared(self) -> set[int]:
        """Return the numbers of the parameters that have no gradient.

        Raises:
            UserError: the script has set one.
        """
        cleared = set()
        with torch._C.DisableTorchFunctionSubclass():
            gradients = [parameter.grad for parameter in self._parameters]
        for number, gradient in enumerate(gradients):
            if gradient is None:
                cleared.add(number)
                # If the script has kept it, it is no longer true.
                if number in self._gradients and not _is_only_here(self._gradients, number):
                    del self._gradients[number]
            elif getattr(gradient, "rows", "") is not self._gradient(number).rows:
                raise UserError(
                    "--layout shard: the .grad of a parameter was set, or computed without the "
                    "forward of DistributedDataParallel, but its sum is with the ranks that own "
                    "it; let backward() compute it, and set it to None or zero only"
                )
        return cleared

    def _gradient(self, number: int) -> RemoteGradient:
        if number not in self._gradients:
            rows = partial(self._rows_of, number)
            self._gradients[number] = RemoteGradient.of(self._parameters[number], rows)
        return self._gradients[number]


def _is_only_here(gradients: Mapping[int, torch.Tensor], number: int) -> bool:
    """Return whether only `gradients` refers to one of them: it, and this call's argument."""
    return sys.getrefcount(gradients[number]) == 2


def _is_plain(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether arguments are numbers, which are the same for all rows."""
    values = [*args, *kwargs.values()]
    return all(
        value is None
        or isinstance(value, int | float)
        or (type(value) is torch.Tensor and value.dim() == 0)
        for value in values
    )


def _rows_of(gradients: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for gradient in gradients:
        if isinstance(gradient, RemoteGradient):
            yield from gradient.rows()
        else:
            yield gradient
