"""Parameters of which rank 0 alone has the values, as the other ranks' models begin on meta.

So one rank alone needs the model whole in host memory. The other ranks' parameters look as if they
were on the device. Until they have owners, whatever uses one there reads it from rank 0, which
then sends each owner its rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kaitian_mpi.balance.ownership import Part
from kaitian_mpi.distributed.shard_buckets import rows_of_part
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.host_memory import HostMemory
from kaitian_mpi.integrations.shard.host_parameters import HostParameters, is_large
from kaitian_mpi.integrations.shard.local_rows import copied_rows
from kaitian_mpi.integrations.shard.remote_reads import NOT_YET, RowValues
from kaitian_mpi.integrations.shard.script_parameters import is_sharded
from kaitian_mpi.train.layouts.shard.row_states import Key
from kaitian_mpi.train.state_transfer import broadcast_state, send_state

if TYPE_CHECKING:
    from mpi4py import MPI


class LentParameters(HostParameters):
    """Large parameters of which rank 0 has the values; the same ones on all ranks."""

    def __init__(
        self,
        module: nn.Module,
        numbers: Collection[int],
        device: torch.device,
        read: Callable[[int, int], Sequence[tuple[int, int, torch.Tensor]]] | None,
    ) -> None:
        """Let some parameters of a module have their values on rank 0 only. Not collective.

        Args:
            module: whose parameters they are.
            numbers: the numbers of these parameters.
            device: where they are used.
            read: returns what rank 0's `serve` returns for a parameter's number and how often the
                script has changed it; None on rank 0 itself.
        """
        self._read_first = read
        self._lock = threading.Lock()
        self._before: dict[tuple[int, int], Sequence[RowValues]] = {}
        super().__init__(module, numbers, device)
        if read is not None:
            self._values.clear()

    def serve(self, number: int, changes: int) -> Any:
        """Return the values that a parameter had on rank 0 after so many changes by the script.

        As plain tuples of each `RowValues`, which can be sent.
        Another rank's script has changed it that often. `NOT_YET` if rank 0's script has not.
        """
        with self._lock:
            if self._changes[number] < changes:
                return NOT_YET
            if self._changes[number] > changes:
                pieces = self._before[number, changes]
            else:  # copies, as the script may change the values while they are sent
                pieces = copied_rows(super()._whole(number))
            return [tuple(rows) for rows in pieces]

    def _whole(self, number: int) -> Sequence[RowValues]:
        if self._read_first is None or not self._holds(number):
            return super()._whole(number)
        return [*starmap(RowValues, self._read_first(number, self._changes[number]))]

    @torch.no_grad()
    def _keep(self, number: int, values: torch.Tensor) -> None:
        with self._lock:
            if self._read_first is None:
                pieces = super()._whole(number)
                memory = HostMemory([*self._parameters.values()])
                self._before[number, self._changes[number]] = [
                    RowValues(begin, end, memory.keep([rows])) for begin, end, rows in pieces
                ]
                self._values[number].copy_(values)
            self._changes[number] += 1


def is_lent(parameter: Any) -> bool:
    """Return whether rank 0 alone has a parameter's values."""
    return is_sharded(parameter) and isinstance(type(parameter).holder, LentParameters)


def move_from_meta(module: nn.Module, device: torch.device) -> list[str]:
    """Move a module's parameters and buffers from meta to a device, without values yet.

    Large parameters take no memory there. Optimizers that have the parameters keep them. Not
    collective.

    Returns:
        The names of these parameters and buffers.
    """
    names = []
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            _replace(name, parameter, device)
            names.append(name)
    moved: dict[int, torch.Tensor] = {}
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                if id(buffer) not in moved:
                    moved[id(buffer)] = torch.zeros_like(buffer, device=device)
                    names.append(f"{path}.{name}" if path else name)
                owner._buffers[name] = moved[id(buffer)]
    return names


def _replace(name: str, parameter: nn.Parameter, device: torch.device) -> None:
    like = torch.zeros_like(parameter, device="meta")
    if is_large(parameter):
        values = torch.zeros(1, dtype=parameter.dtype, device=device).expand(like.shape)
    else:
        values = torch.zeros_like(like, device=device)
    other = nn.Parameter(values, requires_grad=parameter.requires_grad)
    other.__class__ = type(parameter)
    vars(other).update(vars(parameter))
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError as error:
        raise UserError(
            f"--layout shard: the parameter {name} is on meta and already in use; wrap the model "
            "in DistributedDataParallel before anything computes with it"
        ) from error


def give_whole(comm: MPI.Intracomm, parameters: Sequence[nn.Parameter]) -> None:
    """Give all ranks the values of parameters that rank 0 has, on their devices. Collective."""
    for parameter in parameters:
        values = broadcast_state(comm, parameter.detach(), 0, comm.rank > 0)
        if comm.rank > 0:
            parameter.data = values.to(parameter.device)


def give_rows(
    comm: MPI.Intracomm, parameters: Sequence[nn.Parameter], parts: Sequence[Part]
) -> Iterator[tuple[Key, torch.Tensor]]:
    """Send parts of parameters that rank 0 has whole to their owners. Collective.

    Yields:
        The parts that this rank has received: a parameter's number, the first row and the row after
        the last, with the rows on the parameter's device.
    """
    for part in parts:
        parameter = parameters[part.parameter]
        if part.owner == 0:
            continue
        sent = rows_of_part(parameter, part).detach() if comm.rank == 0 else None
        rows = send_state(comm, sent, 0, part.owner)
        if rows is not None:
            yield (part.parameter, part.begin, part.end), rows.to(parameter.device)
