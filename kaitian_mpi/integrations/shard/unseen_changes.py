"""Changes to a sharded parameter's values that autograd does not count, as by NumPy or `data`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from kaitian_mpi.distributed.pending_parameter import memory_users
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.early_state_dicts import NO_LONGER_SHARED

CHANGED_LATE = (
    "--layout shard: {} was changed through a tensor that the script has kept, after the values "
    "that it shows were freed or stepped; change sharded parameters themselves, as by mul_() with "
    "torch.no_grad()"
)
"""The message for a parameter's name."""


class UnseenChanges:
    """Finds what a script has changed unseen in values that it may change so, by copies of them."""

    def __init__(
        self,
        name: Callable[[int], str],
        read_version: Callable[[int], Any],
        write: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Find nothing yet.

        Args:
            name: returns a parameter's name, by its number.
            read_version: returns a value that differs after each change of a parameter.
            write: takes back the values of a parameter.
        """
        self._name = name
        self._read_version = read_version
        self._write = write
        self._copies: dict[int, torch.Tensor] = {}  # of gathered values that may change unseen
        # Values that are freed here, but not by the script, which may still change them, with a
        # copy of each and the version that they are of.
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor, Any]] = {}
        self._has_warned = False  # of a kept tensor that does not follow

    def expect(self, number: int, values: torch.Tensor) -> None:
        """Keep a copy of gathered values, which may change unseen from now on."""
        if number not in self._copies:
            self._copies[number] = values.clone()

    def note_written(self, number: int, values: torch.Tensor) -> None:
        """Take note that gathered values are taken back as they are now."""
        if number in self._copies:
            self._copies[number].copy_(values)

    def is_expected(self, number: int) -> bool:
        """Return whether gathered values may have changed unseen."""
        return number in self._copies

    def free(self, number: int, values: torch.Tensor) -> torch.Tensor | None:
        """Forget gathered values, which are freed here; return them if they have changed.

        Raises:
            UserError: see `take_back`.
        """
        before = self._copies.pop(number)
        if memory_users(values) > 1:  # else what the script changes later would be lost
            self._kept[number] = values, before, self._read_version(number)
            self.take_back()
            return None
        return None if _are_same(before, values) else values

    def take_back(self) -> None:
        """Take what the script has changed in values that it has kept.

        Raises:
            UserError: the parameter has other values by now.
        """
        for number, (values, before, version) in [*self._kept.items()]:
            if not _are_same(values, before):
                if self._read_version(number) != version:
                    raise UserError(CHANGED_LATE.format(self._name(number)))
                self._write(number, values)
                version = self._read_version(number)
                before.copy_(values)
            if memory_users(values) > 1:
                if version != self._read_version(number) and not self._has_warned:
                    self._has_warned = True
                    warnings.warn(NO_LONGER_SHARED.format(self._name(number)), stacklevel=2)
                self._kept[number] = values, before, version
            else:
                del self._kept[number]


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits, so that a NaN is equal to itself."""
    bytes_of = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bytes_of)
