"""A model whose parameters are sharded over the ranks, and whole only while they are used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kaitian_mpi.balance.ownership import bucket_cap
from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.pending_parameter import (
    EXPOSES_MEMORY,
    SETS_DATA,
    PendingParameter,
    is_compiled,
)
from kaitian_mpi.distributed.saved_notes import GatheredValues, SavedNotes
from kaitian_mpi.errors import UserError

_RANDOM_STD = 0.02
IS_COMPILED = (
    "torch.compile does not support sharded parameters, and the model does not fit whole on each "
    "rank; remove torch.compile"
)
"""The message for a compiled model."""

Source = Callable[[int], torch.Tensor]
"""Returns all values of the parameter of this number, in new memory."""

WriteBack = Callable[[int, torch.Tensor], None]
"""Stores all values of a parameter, which a forward may have changed in place."""


class ShardedModel:
    """A model with sharded parameters, which are gathered when they are used.

    Between `begin` and `end`, whatever uses a parameter's values gathers them from a source; at
    other times it raises a `UserError`. The parameters stay the same objects, with their gradients
    and hooks. A parameter's number is its index in the model's `parameters()`.

    Attributes:
        numbers: those of the sharded parameters.
    """

    def __init__(self, model: nn.Module, numbers: Collection[int], device: torch.device) -> None:
        """Leave the model as it is until `shard`; its parameters are then used on `device`.

        Raises:
            UserError: the model is compiled.
        """
        if any(is_compiled(module) for module in model.modules()):
            raise UserError(IS_COMPILED)
        parameters = list(model.named_parameters())
        self.numbers = frozenset(numbers)
        self._model = model
        self._parameters = {number: parameters[number][1] for number in numbers}
        self._number_of = {parameters[number][1]: number for number in numbers}
        self._sharded_class = self._make_parameter_class()
        self._names = {number: parameters[number][0] for number in numbers}
        self._device = device
        self._unsharded: dict[int, GatheredValues] = {}  # by number; only those used last
        self._versions: dict[int, int] = {}  # of the same; -1 if the values may change unseen
        self._notes = SavedNotes(self._parameters, self._unsharded, self.unshard)
        self._source: Source | None = None
        self._write_back: WriteBack | None = None
        self._hooks: Any = None

    def shard(self, rows: Collection[tuple[int, int, int]]) -> dict[Any, torch.Tensor]:
        """Free the sharded parameters' values except some rows; move all others to the device.

        Args:
            rows: which to keep: a parameter's number, the first row, and the one past the last.

        Returns:
            These rows on the device, by the same keys.
        """
        values: dict[Any, torch.Tensor] = {}
        keys_of: dict[int, list[tuple[int, int, int]]] = {}
        for key in rows:
            keys_of.setdefault(key[0], []).append(key)
        for number, parameter in self._parameters.items():
            for key in keys_of.get(number, ()):
                _, begin, end = key
                values[key] = parameter.detach()[begin:end].to(self._device, copy=True)
            self._reshard(number)
        with torch._C.DisableTorchFunctionSubclass():
            self._model.to(self._device)
        return values

    def make_target(self, number: int, values: torch.Tensor) -> nn.Parameter:
        """Return a parameter of some rows of another, for an optimizer to step on the device."""
        needs_gradient = self._parameters[number].requires_grad
        return nn.Parameter(values.to(self._device), requires_grad=needs_gradient)

    def begin(self, source: Source, write_back: WriteBack | None = None) -> None:
        """Gather parameters from `source` when they are used, until `end`; in this thread.

        `write_back` gets the values that a forward has changed in place.
        """
        if self._source is None:
            self._source = source
            self._write_back = write_back
            self._hooks = self._notes.hooks()
            self._hooks.__enter__()

    def end(self, keeps_changes: bool = True) -> None:
        """Free all gathered values. Does nothing without `begin`.

        If not `keeps_changes`, values that a forward has changed are not written back.
        """
        if self._source is not None:
            self._source = None
            hooks = self._hooks
            self._hooks = None
            hooks.__exit__()
            write_back = self._write_back if keeps_changes else None
            self._write_back = None
            resharded = [(number, self._reshard(number)) for number in list(self._unsharded)]
            for number, changed in resharded:
                if write_back is not None and changed is not None:
                    write_back(number, changed)

    def unshard(self, numbers: Sequence[int]) -> None:
        """Gather these parameters, and free the values of all others."""
        if self._source is None and self._sharded_class.fills_no_memory:
            raise UserError(
                f"the optimizer uses the values of {self._names[numbers[0]]} when it is created, "
                "but this parameter is sharded, as the model does not fit whole on each rank; use "
                "another optimizer, or devices with more memory"
            )
        if self._source is None:
            raise UserError(
                f"the parameter {self._names[numbers[0]]} is sharded, and whole only while a step "
                "or an evaluation computes with it; read the weights from a checkpoint, or from "
                "checkpoints/model.pt when the run is finished"
            )
        for number in dict.fromkeys(numbers):
            if number in self._unsharded:
                self._unsharded[number].on_current_stream()
                continue
            unused = [other for other in self._unsharded if other not in numbers]
            for other in unused:
                changed = self._reshard(other)
                if self._write_back is not None and changed is not None:
                    self._write_back(other, changed)
            values = self._source(number)
            self._unsharded[number] = GatheredValues(values)
            with torch._C.DisableTorchFunctionSubclass():
                self._set(number, values)
                self._versions[number] = self._parameters[number]._version

    def _make_parameter_class(self) -> type[PendingParameter]:
        """Return the class of this model's sharded parameters."""
        return type("Sharded", (PendingParameter,), {"materialize": self._unshard_used})

    def _unshard_used(self, parameters: Sequence[PendingParameter], function: Any) -> None:
        """Gather all parameters that a function uses, so that none is freed for another."""
        numbers = [self._number_of[parameter] for parameter in parameters]
        if function == SETS_DATA and self._source is not None:
            raise UserError(
                f"{self._names[numbers[0]]}.data was set by a forward, but the parameter is "
                "sharded; change it in place, as by copy_() with torch.no_grad(), or use devices "
                "on which the model fits whole"
            )
        self.unshard(numbers)
        if function in EXPOSES_MEMORY:
            self._versions |= dict.fromkeys(numbers, -1)

    @contextmanager
    def making_optimizers(self) -> Iterator[None]:
        """Let optimizers that create state at once, as Adagrad does, allocate no memory for it."""
        self._sharded_class.fills_no_memory = True
        try:
            yield
        finally:
            self._sharded_class.fills_no_memory = False

    @contextmanager
    def with_random_values(self) -> Iterator[None]:
        """Give the parameters random values in the block, to try a step without communication."""
        self.begin(_random_values(self._parameters, self._device))
        try:
            yield
        finally:
            self.end()

    def nbytes(self, number: int) -> int:
        """Return the bytes of a whole parameter."""
        parameter = self._parameters[number]
        with torch._C.DisableTorchFunctionSubclass():
            return parameter.numel() * parameter.element_size()

    def bytes_together(self) -> int:
        """Return the most bytes of parameters that are gathered together: see `bucket_cap`."""
        largest = max(parameter.nbytes for parameter in self._model.parameters())
        return bucket_cap(largest, sum(map(self.nbytes, self.numbers)))

    def empty_values(self, number: int) -> torch.Tensor:
        """Return new memory for a whole parameter, on the device."""
        parameter = self._parameters[number]
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)

    def stream(self) -> Any:
        """Return the device's current stream; None if it has none."""
        module = device_of(self._device).streams()
        return None if module is None else module.current_stream(self._device)

    def name(self, number: int) -> str:
        return self._names[number]

    def _set(self, number: int, values: torch.Tensor) -> None:
        self._parameters[number].data = values
        self._notes.follow(number, values)

    def _reshard(self, number: int) -> torch.Tensor | None:
        """Free a parameter's values, unless other tensors still refer to them.

        Returns:
            The values if they may have changed, else None.
        """
        parameter = self._parameters[number]
        gathered = self._unsharded.pop(number, None)
        with torch._C.DisableTorchFunctionSubclass():
            is_changed = self._versions.pop(number, None) != parameter._version
            # One element, expanded to the parameter's shape; NaN, so that a use would be noticed.
            placeholder = torch.full((1,), torch.nan, dtype=parameter.dtype, device=self._device)
            self._set(number, placeholder.expand(parameter.shape))
        parameter.__class__ = self._sharded_class
        torch.clear_autocast_cache()  # it would keep a cast of the values
        if gathered is None or not is_changed:
            return None
        return gathered.after_all_streams()


def _random_values(parameters: Mapping[int, nn.Parameter], device: torch.device) -> Source:
    """Return a source of random values on a device, which parameters of one dtype share."""
    largest = max(parameter.numel() for parameter in parameters.values())
    memory: dict[torch.dtype, torch.Tensor] = {}

    def source(number: int) -> torch.Tensor:
        parameter = parameters[number]
        if parameter.dtype not in memory:
            values = torch.empty(largest, dtype=parameter.dtype, device=device)
            memory[parameter.dtype] = values.normal_(std=_RANDOM_STD)
        return memory[parameter.dtype][: parameter.numel()].view(parameter.shape)

    return source


def check_without_torch_func(model: nn.Module, error: RuntimeError) -> None:
    """Check that a forward has not failed because the model's parameters are sharded.

    Raises:
        UserError: it uses a gradient of torch.func, which does not support hooks of autograd.
    """
    are_sharded = any(isinstance(parameter, PendingParameter) for parameter in model.parameters())
    if are_sharded and "saved tensor hooks" in str(error):
        raise UserError(
            "the loss uses a gradient of torch.func, which does not support sharded parameters; "
            "use torch.autograd.grad, or devices on which the model fits whole"
        ) from error


def can_be_sharded(parameter: nn.Parameter) -> bool:
    """Return whether a parameter can be sharded by rows: a real, contiguous one can."""
    is_plain = type(parameter) is nn.Parameter and parameter.is_contiguous()
    return is_plain and parameter.dim() > 0 and parameter.is_floating_point()
