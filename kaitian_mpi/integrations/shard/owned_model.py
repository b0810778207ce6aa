"""A model in DistributedDataParallel whose rows have owners."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kaitian_mpi.balance.ownership import Part
from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.budget import Owners
from kaitian_mpi.integrations.shard.early_state_dicts import EarlyStateDicts
from kaitian_mpi.integrations.shard.local_rows import LocalRows
from kaitian_mpi.integrations.shard.model_passes import ModelPasses
from kaitian_mpi.integrations.shard.placement import GiveRows
from kaitian_mpi.integrations.shard.remote_reads import RemoteReads
from kaitian_mpi.integrations.shard.script_calls import ScriptCalls
from kaitian_mpi.integrations.shard.script_parameters import ScriptParameters
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.polling import WaitContext
from kaitian_mpi.train.layouts.shard.row_states import Key
from kaitian_mpi.train.layouts.shard.shards import divide_parameters, steps_by_element


@not_compiled
class OwnedModel:
    """What ranks own of a model, which its DDP has whole for the script.

    Attributes:
        parameters: those of the model, by their numbers.
        rows: this rank's, which its optimizers step.
        sharded: the parameters that no rank has whole; None if all are whole on each.
        passes: the forwards, backwards and steps of the model.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        world: World,
        reads: RemoteReads,
        waits: WaitContext,
        calls: ScriptCalls,
        backward_done: Callable[[], None],
    ) -> None:
        """Watch the model in a DDP, whose ranks own nothing yet. Not collective.

        Args:
            ddp: the wrapped model.
            world: all ranks.
            reads: what reads from other ranks.
            waits: makes the context of waiting for other ranks.
            calls: compares what the ranks' scripts do.
            backward_done: called when all ranks have computed a backward.
        """
        self.parameters = list(ddp.module.parameters())
        self.rows = LocalRows(self.parameters, world.rank, reads, waits)
        self.sharded: ScriptParameters | None = None
        self._numbers = {id(p): number for number, p in enumerate(self.parameters)}
        self.passes = ModelPasses(
            self.parameters, self._numbers, self.rows, world, calls, backward_done
        )
        self._module = weakref.ref(ddp.module)
        self._world = world
        self._by_rows = True
        self._group = ddp.process_group

    @property
    def module(self) -> nn.Module:
        """The model, which its DDP wraps."""
        module = self._module()
        assert module is not None
        return module

    @property
    def has_owners(self) -> bool:
        """Whether `assign` was called."""
        return bool(self.rows.parts)

    def wrap_again(self, ddp: DistributedDataParallel) -> None:
        """Be the model of another DDP as well. Not collective."""
        self._module = weakref.ref(ddp.module)
        self._group = ddp.process_group

    def follow_module(self) -> None:
        """Have the parameters that the model has now, before there are owners. Not collective.

        Raises:
            UserError: these are other tensors, for the time of a `functional_call`.
        """
        if not all(parameter.is_leaf for parameter in self.module.parameters()):
            raise UserError(
                "--layout shard: the model's first forward is in torch.func.functional_call of "
                "DistributedDataParallel; use it on the module that is wrapped"
            )
        # Its rows and passes have this list, and these numbers.
        self.parameters[:] = self.module.parameters()
        self._numbers.clear()
        self._numbers.update({id(p): number for number, p in enumerate(self.parameters)})

    def number(self, parameter: torch.Tensor) -> int:
        """Return the number of a parameter."""
        return self._numbers[id(parameter)]

    def assign(
        self,
        index: int,
        owners: Owners,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        give_rows: GiveRows,
        state_dicts: EarlyStateDicts,
    ) -> None:
        """Make ranks the owners of the model's rows. Collective.

        Args:
            index: the index of this model, the same on every rank.
            owners: which fractions the ranks own.
            optimizers: those that step the model.
            device: for parameters that have stayed on the host so far.
            give_rows: gives this rank what rank 0 alone has so far.
            state_dicts: those that the script has made so far.
        """
        self._by_rows = steps_by_element(optimizers)
        parts = self._divide(owners)
        values = give_rows(parts, owners.sharded)
        if owners.sharded:
            self.sharded = self._make_sharded(owners.sharded, device)
            early = state_dicts.by_parameter(self.module, owners.sharded)
            values |= self._shard(self.sharded, parts, values)
            for number, tensors in early.items():
                for tensor in tensors:
                    self.sharded.in_state_dicts.let_follow(number, tensor)
        elif len({parameter.device for parameter in self.parameters}) > 1:
            self.module.to(device)
        self.rows.assign(index, parts, values)
        self.passes.begin(self.module, self._group, self.sharded, owners.prefetches)

    def _divide(self, owners: Owners) -> list[Part]:
        """Return the parts of all parameters, the same on every rank."""
        # Without the values, as some parameters are still on the host on some ranks.
        alike = [
            nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in self.parameters
        ]
        return divide_parameters(
            alike,
            stepped=range(len(self.parameters)),
            owned=owners.sharded,
            pairs=owners.pairs,
            by_rows=self._by_rows,
        )

    def _make_sharded(self, numbers: Collection[int], device: torch.device) -> ScriptParameters:
        return ScriptParameters(
            self.module,
            numbers,
            device,
            read_into=self.rows.read,
            read_version=self.rows.version,
            write=self.rows.write,
        )

    def _shard(
        self, sharded: ScriptParameters, parts: Sequence[Part], given: Collection[Key]
    ) -> dict[Key, torch.Tensor]:
        """Free sharded parameters' values; return this rank's rows of them that were not given."""
        for number in sharded.numbers:  # a graph that has kept its values then fails
            torch.autograd.graph.increment_version(self.parameters[number])
        keys = [(p.parameter, p.begin, p.end) for p in parts if p.owner == self._world.rank]
        return sharded.shard([key for key in keys if key not in given])

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Check that an optimizer can step the parts that there are.

        Raises:
            UserError: it needs whole parameters.
        """
        if self._by_rows and not steps_by_element([optimizer]):
            raise UserError(
                f"--layout shard: {type(optimizer).__name__} was created after the model's first "
                "forward, and needs whole parameters; create it before"
            )
