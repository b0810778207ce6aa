"""Notes that autograd keeps for backward, in place of the gathered values of parameters.

Autograd would keep the values themselves, and with them the memory of the whole model. With a note,
backward gathers them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.collectives.staging import ends_of_streams, keep_for_current_stream


class GatheredValues:
    """The gathered values of a parameter, for use on any stream.

    A stream that uses them waits for the one that gathered them. Their memory is reused only once
    all of these streams are done with it.

    Attributes:
        values: may be used without waiting by code that needs only their shape or dtype.
    """

    def __init__(self, values: torch.Tensor) -> None:
        """Wrap values that the current stream has gathered."""
        self.values = values
        self._stream_module: Any = device_of(values.device).streams()
        self._streams = self._current()
        self._ends = ends_of_streams([values])

    def on_current_stream(self) -> torch.Tensor:
        """Return the values for the current stream."""
        current = self._current()
        if not current <= self._streams:
            for end in self._ends:
                end.let_current_stream_wait()
            keep_for_current_stream(self.values)
            self._streams |= current
        return self.values

    def after_all_streams(self) -> torch.Tensor:
        """Return the values for the current stream, which waits for all other streams' changes."""
        for stream in self._streams - self._current():
            current = self._stream_module.current_stream(self.values.device)
            current.wait_event(stream.record_event())
        return self.on_current_stream()

    def _current(self) -> set[Any]:
        if self._stream_module is None:
            return set()
        return {self._stream_module.current_stream(self.values.device)}


class _SavedNote(NamedTuple):
    """Saved for backward instead of a tensor with a parameter's values, or with a cast of them."""

    number: int
    dtype: torch.dtype
    size: torch.Size
    stride: Sequence[Any]
    offset: Any


class SavedNotes:
    """Recognizes the values of a model's parameters when autograd saves them for backward.

    It does so by their address, or, of a cast of them, by all values.
    """

    def __init__(
        self,
        parameters: Mapping[int, nn.Parameter],
        gathered: Mapping[int, GatheredValues],
        gather: Callable[[Sequence[int]], None],
    ) -> None:
        """Keep notes of parameters, given by number.

        Args:
            parameters: which may be gathered.
            gathered: the values of those that are.
            gather: adds to `gathered`, for backward, the values of these numbers.
        """
        self._parameters = parameters
        self._gathered = gathered
        self._gather = gather
        self._addresses: dict[int, int] = {}  # by number, where the parameter's values are
        self._number_at: dict[int, int] = {}  # by address, whose values are there

    def hooks(self) -> saved_tensors_hooks:
        """Return the context in which autograd saves notes."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def follow(self, number: int, values: torch.Tensor) -> None:
        """Follow a parameter to where its values are from now on."""
        old_address = self._addresses.get(number, 0)
        if self._number_at.get(old_address) == number:
            del self._number_at[old_address]
        address = values.untyped_storage().data_ptr()
        self._addresses[number] = address
        self._number_at[address] = number

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the parameter in whose memory a tensor is; None if in none's."""
        return self._number_at.get(tensor.untyped_storage().data_ptr())

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd saves for backward: a note if the tensor is a parameter's values."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # it has no memory of its own
            return tensor
        number = self.number_of(tensor)
        if number is not None and tensor.dtype != self._parameters[number].dtype:
            return tensor
        strides = tensor.stride()
        if number is None:
            number = self._number_of_cast(tensor)
        elif number not in self._gathered:
            # An autograd function has saved this parameter after it used another, which freed the
            # values: these are the strides of the placeholder.
            strides = torch.empty(tensor.size(), device="meta").stride()
        if number is None:
            return tensor
        return _SavedNote(number, tensor.dtype, tensor.size(), strides, tensor.storage_offset())

    def _number_of_cast(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the parameter that a tensor is autocast's cast of; None if none.

        The values are compared, because an activation may have the same size. So the host waits
        for the device, as it does when values are gathered.
        """
        for number, gathered in self._gathered.items():
            values = gathered.values
            size = values.numel() * tensor.element_size()
            is_cast = tensor.is_floating_point() and tensor.dtype != values.dtype
            if is_cast and tensor.untyped_storage().nbytes() == size:
                values = gathered.on_current_stream()
                flat = tensor.as_strided((values.numel(),), (1,), 0)
                if torch.equal(flat, values.view(-1).to(tensor.dtype)):
                    return number
        return None

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return the tensor for which `pack` returned `saved`."""
        if not isinstance(saved, _SavedNote):
            return saved  # type: ignore[no-any-return]
        self._gather([saved.number])
        values = self._gathered[saved.number].on_current_stream().to(saved.dtype)
        return values.as_strided(saved.size, saved.stride, saved.offset)
