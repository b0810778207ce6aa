"""A state in which a rank has a parameter whole or not at all, for layouts pipeline and experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from kaitian_mpi.distributed.pending_parameter import PendingParameter
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.tensor_files import Spool
from kaitian_mpi.train.layouts.divided_state import DividedState
from kaitian_mpi.train.layouts.moving import set_data
from kaitian_mpi.train.partition import Collected
from kaitian_mpi.train.state_transfer import broadcast_state, copy_state, send_state

if TYPE_CHECKING:
    from mpi4py import MPI


class ParameterOwners(DividedState[int]):
    """The parameters that this rank has, and their optimizer state.

    Only some ranks have the values of an owned parameter. On the other ranks it has the same shape,
    takes no memory, and raises an error when it is used. All ranks have the other parameters. A
    parameter's number is its index in the model's `parameters()`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        owned: Iterable[nn.Parameter],
        device: torch.device,
    ) -> None:
        """Begin with all parameters, and without owners; `owned` are those that will have some."""
        self._device = device
        self.owners: list[list[int]] = []
        """By number, the ranks that have a parameter; empty before `assign_owners`."""
        parameters = list(model.parameters())
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        super().__init__(model, optimizers, frozenset(numbers[p] for p in owned))
        self._elsewhere = type("Elsewhere", (PendingParameter,), {"materialize": self._refuse})
        self._strides = [parameter.stride() for parameter in parameters]
        self._present = set(range(len(parameters)))
        """The parameters that this rank has, with their state."""
        self._new_values: dict[int, torch.Tensor] = {}
        """Values from a checkpoint or another rank that are not in their parameter yet."""
        state_dicts = [optimizer.state_dict() for optimizer in optimizers]
        self._waiting_states = self._by_number(state_dicts)
        """States of the optimizers that are not given to ranks yet."""
        for optimizer in optimizers:
            optimizer.state.clear()

    @abstractmethod
    def _where(self, name: str) -> str:
        """Say where the values of a parameter are that this rank does not have."""

    @abstractmethod
    def _modules_by_source(self) -> Iterable[tuple[Sequence[nn.Module], int]]:
        """Return the modules whose buffers only some ranks compute, each with such a rank."""

    def _keep(
        self, states: Mapping[int, dict[str, Any]], values: Mapping[int, torch.Tensor]
    ) -> None:
        self._waiting_states = dict(states)
        # Parameters without elements are in no checkpoint.
        empty = {n: self._parameters[n] for n in self.owned if not self._parameters[n].numel()}
        self._new_values = {n: torch.zeros(p.shape, dtype=p.dtype) for n, p in empty.items()}
        self._new_values |= values
        # Every rank has the values of parameters that are not owned, and now their states.
        self._present = set(range(len(self._parameters))) - self.owned

    def drop(self) -> None:
        super().drop()
        self._waiting_states = {}
        self.owners = []
        self._new_values = {}
        self._present = set()

    def drop_start(self) -> None:
        if not self.owners:
            self.drop()

    @property
    def has_copies(self) -> bool:
        return all(len(ranks) > 1 for ranks in self.owners)

    def is_complete(self, comm: MPI.Intracomm) -> bool:
        """Return whether these ranks have all parameters and their state. Collective."""
        present = set[int]().union(*gather_values(comm, sorted(self._available())))
        return len(present) == len(self._parameters)

    def assign_owners(self, world: World, owners: Sequence[Sequence[int]]) -> None:
        """Give each rank the parameters that it is to have, and free the others. Collective.

        `owners` are the ranks of each parameter, by number: all ranks, if it is not owned.
        """
        available = [set(n) for n in gather_values(world.comm, sorted(self._available()))]
        states = {number: self._state(number) for number in self._available()}
        for number, ranks in enumerate(owners):
            source = next(rank for rank, numbers in enumerate(available) if number in numbers)
            for target in ranks:
                if number not in available[target]:
                    self._transfer(world, number, states, source, target)
            if world.rank not in ranks:  # free its memory before the next parameter arrives
                self._release(number)
                states.pop(number, None)
        for number in states:
            self._place_value(number)
        self.owners = [list(ranks) for ranks in owners]
        self._waiting_states = {}
        self._restrict(
            {n: [(self._parameters[n], copy_state(states[n], share=True))] for n in states}
        )
        self.targets = {n: self._parameters[n] for n in states}

    def _transfer(
        self, world: World, number: int, states: dict[int, dict[str, Any]], source: int, target: int
    ) -> None:
        """Send a parameter from rank `source` to rank `target`, with its state. Collective."""
        sent = None
        if world.rank == source:
            # Every rank has the values of a parameter that is not owned.
            sent = (self._value(number) if number in self.owned else None, states[number])
        received = send_state(world.comm, sent, source, target)
        if world.rank == target:
            value, states[number] = received
            if value is not None:
                self._new_values[number] = value

    @torch.no_grad()
    def share_buffers(self, world: World) -> None:
        """Copy the buffers that only some ranks compute to all ranks. Collective."""
        for modules, source in self._modules_by_source():
            buffers = list(dict.fromkeys(b for module in modules for b in module.buffers()))
            if not buffers:
                continue
            sent = buffers if world.rank == source else None
            received = broadcast_state(world.comm, sent, source, receives=True)
            if world.rank != source:
                for buffer, value in zip(buffers, received, strict=True):
                    buffer.copy_(value)

    def collect(
        self,
        world: World,
        folder: Path | None,
        only_values: bool = False,
        on_piece: Callable[[], None] = lambda: None,
    ) -> Collected:
        self.share_buffers(world)
        spool = Spool(folder)
        values: dict[int, torch.Tensor] = {}
        states: dict[int, dict[str, Any]] = {}
        for number, ranks in enumerate(self.owners):
            source = ranks[0]
            content: Any = None  # a parameter's value and optimizer state
            if world.rank == source:
                content = (self._value(number), {} if only_values else self._state(number))
            if source != 0:
                content = send_state(world.comm, content, source, 0, on_piece)
            if world.rank != 0:
                continue
            values[number], states[number] = content
            if source != 0:  # the host's memory may not hold all that is received
                values[number] = _spooled(values[number], spool)
                states[number] = {k: _spooled(item, spool) for k, item in states[number].items()}
                on_piece()
        optimizers = self._with_states(states) if world.rank == 0 else self.optimizer_states()
        return Collected(self._with_values(values), optimizers, spool.fault)

    def _available(self) -> set[int]:
        """Return the parameters whose values this rank has, in the parameter or not."""
        return self._present | self._new_values.keys()

    def _value(self, number: int) -> torch.Tensor:
        if number in self._new_values:
            return self._new_values[number]
        return self._parameters[number].detach()

    def _state(self, number: int) -> dict[str, Any]:
        """Return the optimizer's state of a parameter that this rank has."""
        return self._state_of(self._parameters[number]) or self._waiting_states.get(number, {})

    def _release(self, number: int) -> None:
        """Free a parameter that this rank does not need; a use of its values raises an error."""
        self._new_values.pop(number, None)
        self._present.discard(number)
        parameter = self._parameters[number]
        if not isinstance(parameter, PendingParameter):
            # On this rank's device, as the model's own code may ask where the parameters are.
            placeholder = torch.zeros((), dtype=parameter.dtype, device=self._device)
            set_data(parameter, placeholder.expand(parameter.shape))
            if type(parameter) is nn.Parameter:
                parameter.__class__ = self._elsewhere
        for optimizer in self._optimizers:
            optimizer.state.pop(parameter, None)

    def _place_value(self, number: int) -> None:
        """Put the value of a parameter that this rank keeps into the parameter, on the device."""
        parameter = self._parameters[number]
        value = self._new_values.pop(number, None)
        if isinstance(parameter, PendingParameter):
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        if value is not None:
            data = torch.empty_strided(
                value.shape, self._strides[number], dtype=value.dtype, device=self._device
            )
            set_data(parameter, data.copy_(value))
        elif parameter.device.type != self._device.type:
            set_data(parameter, parameter.detach().to(self._device))
        self._present.add(number)

    def _refuse(self, parameters: Sequence[nn.Parameter], function: Any) -> None:
        """Say that this rank does not have the values of a parameter that a function uses."""
        used = parameters[0]
        name = next(name for name, n in self._names.items() if self._parameters[n] is used)
        raise UserError(
            f"the parameter {name} is {self._where(name)}, and this rank does not have its values; "
            "read the weights from a checkpoint, or from checkpoints/model.pt when the run is "
            "finished"
        )


def _spooled(value: Any, spool: Spool) -> Any:
    """Return a value; the spool's copy of it if it is a tensor that is not a single number."""
    has_rows = isinstance(value, torch.Tensor) and value.dim() > 0
    return spool.keep([value]) if has_rows else value
