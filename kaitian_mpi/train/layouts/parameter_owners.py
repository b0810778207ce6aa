"""A state in which ranks have whole parameters: what pipeline and experts have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
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

    Those that are owned have values on some ranks only: on the others are tensors of their shape
    that take no memory, whose use raises an error. All others are on every rank. What the
    optimizers step is named by its number.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        owned: Iterable[nn.Parameter],
        device: torch.device,
    ) -> None:
        """Begin with all parameters, and without owners."""
        self._device = device
        self.owners: list[list[int]] = []
        """The ranks that have a parameter, by its number; empty before `assign_owners`."""
        parameters = list(model.parameters())
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        super().__init__(model, optimizers, frozenset(numbers[p] for p in owned))
        self._elsewhere = type("Elsewhere", (PendingParameter,), {"materialize": self._refuse})
        self._strides = [parameter.stride() for parameter in parameters]
        self._present = set(range(len(parameters)))
        """The parameters that this rank has, with their state."""
        self._new: dict[int, torch.Tensor] = {}
        """Values of a checkpoint, or of another rank, that are not in a parameter yet."""
        self._loose = self._by_number([optimizer.state_dict() for optimizer in optimizers])
        """States that have no rank yet."""
        for optimizer in optimizers:
            optimizer.state.clear()

    @abstractmethod
    def _where(self, name: str) -> str:
        """Say where the values of a parameter are that this rank has not."""

    @abstractmethod
    def _modules_by_source(self) -> Iterable[tuple[Sequence[nn.Module], int]]:
        """Return the modules whose buffers only some ranks compute, each with one of these."""

    def _keep(
        self, states: Mapping[int, dict[str, Any]], values: Mapping[int, torch.Tensor]
    ) -> None:
        self._loose = dict(states)
        # Those without numbers are in no checkpoint.
        empty = {n: self._parameters[n] for n in self.owned if not self._parameters[n].numel()}
        self._new = {n: torch.zeros(p.shape, dtype=p.dtype) for n, p in empty.items()}
        self._new |= values
        # Of the others the values are on every rank; their states are here.
        self._present = set(range(len(self._parameters))) - self.owned

    def drop(self) -> None:
        super().drop()
        self._loose = {}
        self.owners = []
        self._new = {}
        self._present = set()

    def drop_start(self) -> None:
        if not self.owners:
            self.drop()

    @property
    def has_copies(self) -> bool:
        return all(len(ranks) > 1 for ranks in self.owners)

    def is_complete(self, comm: MPI.Intracomm) -> bool:
        """Return whether these ranks have all parameters and their state. Collective."""
        present = set[int]().union(*gather_values(comm, sorted(self._has())))
        return len(present) == len(self._parameters)

    def assign_owners(self, world: World, owners: Sequence[Sequence[int]]) -> None:
        """Give each rank the parameters that it is to have, and free the others. Collective.

        `owners` are the ranks of each parameter, by its number; all ranks of one that is not owned.
        """
        present = [set(numbers) for numbers in gather_values(world.comm, sorted(self._has()))]
        states = {number: self._state(number) for number in self._has()}
        for number, ranks in enumerate(owners):
            source = next(rank for rank, numbers in enumerate(present) if number in numbers)
            for target in ranks:
                if number not in present[target]:
                    value = None
                    if world.rank == source:
                        value = (
                            self._value(number) if number in self.owned else None,
                            states[number],
                        )
                    received = send_state(world.comm, value, source, target)
                    if world.rank == target:
                        new, states[number] = received
                        if new is not None:
                            self._new[number] = new
            if world.rank not in ranks:  # free it before the next arrives
                self._release(number)
                states.pop(number, None)
        for number in states:
            self._settle(number)
        self.owners = [list(ranks) for ranks in owners]
        self._loose = {}
        kept = {n: [(self._parameters[n], copy_state(states[n], share=True))] for n in states}
        self._restrict(kept)
        self.targets = {n: self._parameters[n] for n in states}

    @torch.no_grad()
    def share_buffers(self, world: World) -> None:
        """Give every rank the buffers that only some compute. Collective."""
        for modules, source in self._modules_by_source():
            buffers = list(dict.fromkeys(b for module in modules for b in module.buffers()))
            if not buffers:
                continue
            sent = buffers if world.rank == source else None
            received = broadcast_state(world.comm, sent, source, receives=True)
            if world.rank != source:
                for buffer, value in zip(buffers, received, strict=True):
                    buffer.copy_(value)

    def collect(self, world: World, folder: Path | None, only_values: bool = False) -> Collected:
        self.share_buffers(world)
        spool = Spool(folder)
        whole: dict[int, torch.Tensor] = {}
        states: dict[int, dict[str, Any]] = {}
        for number, ranks in enumerate(self.owners):
            state = None
            if world.rank == ranks[0]:
                state = self._value(number), {} if only_values else self._state(number)
            if ranks[0] != 0:
                state = send_state(world.comm, state, ranks[0], 0)
                if world.rank == 0:
                    value, optimizer_state = state
                    kept = {name: _kept(item, spool) for name, item in optimizer_state.items()}
                    state = _kept(value, spool), kept
            if world.rank == 0:
                whole[number], states[number] = state  # type: ignore[misc]
        optimizers = self._with_states(states) if world.rank == 0 else self.optimizer_states()
        return Collected(self._with_values(whole), optimizers, spool.fault)

    def _has(self) -> set[int]:
        return self._present | self._new.keys()

    def _value(self, number: int) -> torch.Tensor:
        if number in self._new:
            return self._new[number]
        return self._parameters[number].detach()

    def _state(self, number: int) -> dict[str, Any]:
        """Return the optimizer's state of a parameter that this rank has."""
        return self._state_of(self._parameters[number]) or self._loose.get(number, {})

    def _release(self, number: int) -> None:
        """Free a parameter that this rank does not need; what uses its values gets an error."""
        self._new.pop(number, None)
        self._present.discard(number)
        parameter = self._parameters[number]
        if not isinstance(parameter, PendingParameter):
            # On this rank's device, as the model's own code may ask where the parameters are.
            nothing = torch.zeros((), dtype=parameter.dtype, device=self._device)
            set_data(parameter, nothing.expand(parameter.shape))
            if type(parameter) is nn.Parameter:
                parameter.__class__ = self._elsewhere
        for optimizer in self._optimizers:
            optimizer.state.pop(parameter, None)

    def _settle(self, number: int) -> None:
        """Give a parameter of this rank's its value, on its device."""
        parameter, value = self._parameters[number], self._new.pop(number, None)
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
        """Raise why the values of some parameters, which a function uses, are not here."""
        used = parameters[0]
        name = next(name for name, n in self._names.items() if self._parameters[n] is used)
        raise UserError(
            f"the parameter {name} is {self._where(name)}, and this rank does not have its values; "
            "read the weights from a checkpoint, or from checkpoints/model.pt when the run is "
            "finished"
        )


def _kept(value: Any, spool: Spool) -> Any:
    is_tensor = isinstance(value, torch.Tensor) and value.dim() > 0
    return spool.keep([value]) if is_tensor else value
