"""A model's sharded parameters in the `state_dict`s of its script, which read them when written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from kaitian_mpi.integrations.shard.host_memory import HostMemory
from kaitian_mpi.integrations.shard.lazy_value import LazyValue, ValueSource

ReadInto = Callable[[int, torch.Tensor], None]
"""Reads a parameter's values from its owners into a tensor for them, on any device."""


class StateDictValues:
    """What a script's `state_dict`s have of a model's sharded parameters."""

    def __init__(
        self,
        parameters: Mapping[int, nn.Parameter],
        read_into: ReadInto,
        read_version: Callable[[int], Any],
        take_changes: Callable[[], None],
    ) -> None:
        """Make nothing yet.

        Args:
            parameters: the sharded ones, by number.
            read_into: reads a parameter from its owners. Not collective.
            read_version: returns a value that differs after each change of a parameter.
            take_changes: gives the owners what the script has just changed on each rank.
        """
        self._parameters = parameters
        self._numbers = {parameter: number for number, parameter in parameters.items()}
        self._read_into = read_into
        self._read_version = read_version
        self._take_changes = take_changes
        self._sources: dict[int, ValueSource] = {}
        self._made: dict[int, LazyValue] | None = None  # while a state_dict is made

    @contextmanager
    def making(self) -> Iterator[None]:
        """Let the `state_dict` that is made in the block have values that are read when written."""
        self._take_changes()
        outer = self._made
        self._made = {} if outer is None else outer
        try:
            yield
        finally:
            self._made = outer

    def value_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return what stands for a parameter in the `state_dict` that is made; else None."""
        if self._made is None:
            return None
        number = self._numbers[parameter]  # type: ignore[index]
        if number not in self._made:
            self._made[number] = LazyValue.of(self._source_of(number))
        return self._made[number]

    def let_follow(self, number: int, tensor: torch.Tensor) -> None:
        """Let a tensor show a parameter's values, from a `state_dict` made before it was sharded.

        Not collective.
        """
        LazyValue.become(tensor, self._source_of(number))

    def _source_of(self, number: int) -> ValueSource:
        """Return where the values of a parameter are read from, the same for each `state_dict`."""
        if number not in self._sources:
            parameter = self._parameters[number]
            self._sources[number] = ValueSource(
                torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"),
                partial(self._read_into, number),
                partial(self._latest_version, number),
                lambda like: HostMemory([*self._parameters.values()]).empty(like),
            )
        return self._sources[number]

    def _latest_version(self, number: int) -> Any:
        self._take_changes()
        return self._read_version(number)
