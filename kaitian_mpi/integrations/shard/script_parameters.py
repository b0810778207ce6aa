"""Sharded parameters that a script may use at any time, in any order, on any rank alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ClassVar, TypeGuard

import torch
from torch import nn

from kaitian_mpi.distributed.gathering import Gathering
from kaitian_mpi.distributed.pending_parameter import (
    EXPOSES_MEMORY,
    SETS_DATA,
    PendingParameter,
    needs_no_values,
    pending_in,
)
from kaitian_mpi.distributed.sharded_model import ShardedModel
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.state_dict_values import ReadInto, StateDictValues
from kaitian_mpi.integrations.shard.unseen_changes import CHANGED_LATE, UnseenChanges

_MAY_CHANGE_UNSEEN = -1  # in place of a version, in ShardedModel

# Held by a call that uses sharded parameters' values, which another thread's call would free. The
# thread that answers other ranks never uses them.
_one_thread = threading.RLock()


class ScriptParameter(PendingParameter):
    """A sharded parameter of a script's model."""

    holder: ClassVar[ScriptParameters]
    """Of all sharded parameters of its model."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if needs_no_values(func):
            return super().__torch_function__(func, types, args, kwargs)
        used = dict.fromkeys(
            type(p).holder for p in pending_in((args, kwargs or {})) if is_sharded(p)
        )
        if getattr(func, "__name__", "") == "detach":
            for holder in used:
                value = holder.in_state_dicts.value_of(args[0])
                if value is not None:
                    return value
        with ExitStack() as stack:
            stack.enter_context(_one_thread)
            for holder in used:
                stack.enter_context(holder.around_call())
            result = super().__torch_function__(func, types, args, kwargs)
            for holder in used:
                holder.write_changes()
                holder.note_alias(result)
        return result


def is_sharded(parameter: Any) -> TypeGuard[ScriptParameter]:
    """Return whether something is a sharded parameter of a script's model."""
    return isinstance(parameter, ScriptParameter)


class ScriptParameters(ShardedModel):
    """A model's sharded parameters, in a script that is not ours.

    A forward with gradients and its backward gather them together with the other ranks; any other
    use reads them from their owners, which needs no other rank's script.

    Attributes:
        in_state_dicts: what the script's `state_dict`s have of them.
    """

    def __init__(
        self,
        model: nn.Module,
        numbers: Collection[int],
        device: torch.device,
        read_into: ReadInto,
        read_version: Callable[[int], Any],
        write: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Leave the model as it is until `shard`.

        Args:
            model: whose parameters are to be sharded.
            numbers: the numbers of these parameters.
            device: where they are used.
            read_into: reads a parameter from its owners. Not collective.
            read_version: returns a value that differs after each change of a parameter.
            write: takes back the values of a parameter that the script has changed in place.
        """
        super().__init__(model, numbers, device)
        self._read_into = read_into
        self._source = self.read
        self._write_back = write
        self._unseen = UnseenChanges(self.name, read_version, write)
        self._versions_freed: dict[int, int] = {}
        self._step_thread: int | None = None  # from a forward's begin to its backward's end
        self.in_state_dicts = StateDictValues(
            self._parameters, read_into, read_version, self._take_changes
        )

    @torch.no_grad()
    def read(self, number: int) -> torch.Tensor:
        """Return a parameter's values from its owners, on the device. Not collective."""
        values = self.empty_values(number)
        with torch._C.DisableTorchFunctionSubclass():
            self._read_into(number, values)
        return values

    def begin_forward(self, gathering: Gathering, is_first: bool) -> None:
        """Gather what a forward with gradients uses; `is_first` if no backward is due."""
        if is_first:
            self.free()
        self._source = gathering.unshard
        self._step_thread = threading.get_ident()
        if self._hooks is None:
            self._hooks = self._notes.hooks()
            self._hooks.__enter__()

    def end_forward(self) -> None:
        """Leave what comes between a forward and its backward to `around_call`."""
        if self._hooks is not None:
            hooks = self._hooks
            self._hooks = None
            hooks.__exit__()

    def end_backward(self) -> None:
        """Free all values, and read them from their owners from now on."""
        self.end_forward()
        self._source = self.read
        self._step_thread = None
        self.free()

    def move(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Follow `Module.to` and its like: the values are used on another device from now on.

        Raises:
            UserError: it would change the dtype.
        """
        for parameter in self._parameters.values():
            like = torch.empty(0, dtype=parameter.dtype, device=self._device)
            changed = change(like)
            if changed.dtype != like.dtype:
                raise UserError(
                    f"--layout shard: the model was converted to {changed.dtype} after its first "
                    "forward; convert it before, or use torch.autocast"
                )
            device = changed.device
        if device != self._device:
            self.free()
            self._device = device

    def write_changes(self) -> None:
        """Take what a function has changed in place, as on each rank. Not collective.

        At once: other ranks may read it while this one's script waits for them.
        """
        for number in self._unsharded:
            version = _version_of(self._parameters[number])
            if self._versions[number] not in (version, _MAY_CHANGE_UNSEEN):
                assert self._write_back is not None
                values = self._unsharded[number].after_all_streams()
                self._write_back(number, values)
                self._versions[number] = version
                self._unseen.note_written(number, values)

    def note_alias(self, result: Any) -> None:
        """Take note that a script has a tensor in a parameter's memory that NumPy could change."""
        if type(result) is not torch.Tensor or (result.requires_grad and torch.is_grad_enabled()):
            return  # torch does not let NumPy have it
        has_memory = not torch._C._functorch.is_functorch_wrapped_tensor(result)
        if has_memory and result.layout is torch.strided:
            number = self._notes.number_of(result)
            if number in self._unsharded:
                self._unseen.expect(number, self._unsharded[number].values)

    def free(self) -> None:
        """Free the values that this rank has beside its rows. Not collective."""
        for number in [*self._unsharded]:
            changed = self._reshard(number)
            if changed is not None:
                assert self._write_back is not None
                self._write_back(number, changed)
        self._unseen.take_back()

    def _take_changes(self) -> None:
        """Take what the script has changed, unless another thread computes with the values."""
        with _one_thread:
            if not self._is_used_elsewhere():
                self.free()

    def _is_used_elsewhere(self) -> bool:
        """Return whether another thread is between the begin of a forward and its backward's end.

        On an accelerator, backward uses parameters in threads of its own.
        """
        is_in_backward = torch._C._current_graph_task_id() != -1
        return not is_in_backward and self._step_thread not in (None, threading.get_ident())

    def _make_parameter_class(self) -> type[PendingParameter]:
        methods = {"materialize": self._unshard_used, "holder": self}
        return type("Sharded", (ScriptParameter,), methods)

    def around_call(self) -> AbstractContextManager[Any]:
        """Return the context of a call, in which autograd keeps notes of the values."""
        is_in_backward = torch._C._current_graph_task_id() != -1
        if self._hooks is not None or is_in_backward or not torch.is_grad_enabled():
            return nullcontext()
        return self._notes.hooks()

    def _unshard_used(self, parameters: Sequence[PendingParameter], function: Any) -> None:
        if function == SETS_DATA:
            raise UserError(
                f"--layout shard: {self.name(self._number_of[parameters[0]])}.data was set, but "
                "the parameter is sharded; change it in place, as by copy_() with torch.no_grad()"
            )
        if self._is_used_elsewhere():
            raise UserError(
                f"--layout shard: {self.name(self._number_of[parameters[0]])} is used by a thread "
                "while another one computes a forward or a backward, for which ranks gather it "
                "together; use sharded parameters in the thread that trains, or between two steps"
            )
        self._unseen.take_back()
        for parameter in parameters:
            number = self._number_of[parameter]
            version = _version_of(parameter)
            if self._versions_freed.pop(number, version) != version:
                raise UserError(CHANGED_LATE.format(self.name(number)))
        super()._unshard_used(parameters, function)
        if function in EXPOSES_MEMORY:
            for number in (self._number_of[parameter] for parameter in parameters):
                self._unseen.expect(number, self._unsharded[number].values)

    def _reshard(self, number: int) -> torch.Tensor | None:
        unsharded = self._unsharded.get(number)
        changed = super()._reshard(number)
        self._versions_freed[number] = _version_of(self._parameters[number])
        if unsharded is None or not self._unseen.is_expected(number):
            return changed
        return self._unseen.free(number, unsharded.after_all_streams())


def _version_of(parameter: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter._version
