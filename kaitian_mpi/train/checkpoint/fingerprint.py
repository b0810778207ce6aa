"""Tells whether weights have been changed since a moment, without a copy of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Fingerprint:
    """A mark of tensors, which nearly every change of them changes.

    It holds their addresses, their versions, and a value of each: what writes through `.data`
    changes no version. Taking it costs tens of microseconds, and does not wait for the device.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take the mark of these tensors, which stay the same objects; their memory may not."""
        self._tensors = [tensor for tensor in tensors if _has_mark(tensor)]
        self._addresses: list[int] = []
        self._values = [torch.empty(0, dtype=torch.uint8)]
        self.take()

    def take(self) -> None:
        """Take the mark of the tensors as they are now."""
        self._taken = self._current()

    def matches(self) -> bool:
        """Return whether the tensors have the mark that was taken last; waits for the device."""
        addresses, versions, values = self._taken
        addresses_now, versions_now, values_now = self._current()
        is_same = (addresses, versions) == (addresses_now, versions_now)
        return is_same and torch.equal(values, values_now)

    @torch.no_grad()
    def _current(self) -> tuple[list[int], list[int], torch.Tensor]:
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if addresses != self._addresses:
            self._addresses = addresses
            self._values = [_middle_value(tensor) for tensor in self._tensors]
        return addresses, [tensor._version for tensor in self._tensors], torch.cat(self._values)


def _has_mark(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory and a version of its own."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    is_plain = is_plain and tensor.layout == torch.strided and not tensor.is_meta
    return is_plain and tensor.numel() > 0 and not tensor.is_inference()


def _middle_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of one of a tensor's values, in the tensor's memory.

    As bytes NaN is equal to itself, and they have the same type for all tensors.
    """
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    first = tensor.storage_offset() + sum(size // 2 * stride for size, stride in pairs)
    return tensor.detach().as_strided((1,), (1,), first).view(torch.uint8)
