"""The models and optimizers of a script of which ranks own rows."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi.devices.memory_limit import unlimited
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.budget import LayoutSettings, emulated, find_owners
from kaitian_mpi.integrations.shard.early_state_dicts import EarlyStateDicts
from kaitian_mpi.integrations.shard.optimizer_registry import OptimizerRegistry
from kaitian_mpi.integrations.shard.owned_model import OwnedModel
from kaitian_mpi.integrations.shard.owned_optimizer import check_steps_by_parameter
from kaitian_mpi.integrations.shard.placement import Placement
from kaitian_mpi.integrations.shard.remote_reads import ReadKind, RemoteReads
from kaitian_mpi.integrations.shard.script_calls import ScriptCall, ScriptCalls
from kaitian_mpi.integrations.shard.served_registry import ServedRegistry
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.runtime.lifecycle import register_close, unregister_close
from kaitian_mpi.runtime.polling import WaitContext, sleeping_barrier

_COLLECTED_BYTES = 1 << 20


class TrainerShards:
    """What this rank owns of the models that its script wraps in DistributedDataParallel.

    Attributes:
        world: all ranks, each of which runs the script.
        settings: how to lay out models.
        placement: where parameters are before they have owners.
        state_dicts: the state dicts of modules from before they have owners.
        optimizers: those that the script has created, and this rank's side of them.
        reads: what reads from other ranks what they own.
    """

    def __init__(self, world: World, settings: LayoutSettings, waits: WaitContext) -> None:
        """Own nothing yet, and answer other ranks' reads until all have come to their exit.

        Collective. `waits` makes the context of waiting for other ranks.
        """
        self.world = world
        self.settings = settings
        self.placement = Placement(world, settings.shards_parameters, self._read_first)
        self.state_dicts = EarlyStateDicts()
        self._waits = waits
        self._has_models = False
        self._models = weakref.WeakKeyDictionary[DistributedDataParallel, OwnedModel]()
        # By the `id` of a parameter: the parameter, as its `id` may become another one's, and what
        # it is of.
        self._of_parameters: dict[
            int, tuple[weakref.ref[torch.Tensor], weakref.ref[OwnedModel]]
        ] = {}
        self._served = ServedRegistry()
        self._deleted_bytes = 0  # of the rows of deleted models, since Python has looked for these
        self.optimizers = OptimizerRegistry(self.model_of, self._served)
        self.reads = RemoteReads(world.comm, self._serve)
        self._calls = ScriptCalls(world.comm, waits)
        register_close(self._check_used)

    def end(self) -> None:
        """Wait until all ranks' scripts have ended. Collective.

        Raises:
            UserError: another rank's script goes on with its models.
        """
        self._calls.end()

    def close(self) -> None:
        """Answer no more reads. Collective."""
        unregister_close(self._check_used)
        self._calls.close()
        self.reads.close()

    def add_model(self, ddp: DistributedDataParallel) -> None:
        """Take note of a model, which gets owners before its first forward with gradients.

        A model that is wrapped again keeps those that it has.

        Raises:
            UserError: some of its parameters are of another model, or were other ones.
        """
        parameters = [*ddp.module.parameters()]
        owned_models = {id(m): m for p in parameters if (m := self.model_of(p))}
        if owned_models:
            model, *others = owned_models.values()
            is_alike = [*map(id, model.parameters)] == [*map(id, parameters)]
            if not is_alike and model.module is ddp.module:
                raise UserError(
                    "--layout shard: a model was wrapped in DistributedDataParallel again after "
                    "parameters were added, removed or replaced; do that before it is first wrapped"
                )
            if others or not is_alike:
                raise UserError(
                    "--layout shard does not support parameters in two models of "
                    "DistributedDataParallel; wrap the whole model once"
                )
            model.wrap_again(ddp)
            self._models[ddp] = model
            return
        self._has_models = True
        self._models[ddp] = model = OwnedModel(
            ddp, self.world, self.reads, self._waits, self._calls, self._backward_done
        )
        self._note_parameters(model)

    def models(self) -> list[OwnedModel]:
        """Return the models that the script still has."""
        return [*dict.fromkeys(self._models.values())]

    def model_of(self, parameter: torch.Tensor) -> OwnedModel | None:
        """Return the model that a parameter is of; None if that is not in a DDP."""
        found = self._of_parameters.get(id(parameter))
        return found[1]() if found is not None and found[0]() is parameter else None

    def begin_forward(self, ddp: DistributedDataParallel) -> None:
        """Choose the owners before the first forward with gradients. Collective then."""
        model = self._models.get(ddp)
        if model is None or not torch.is_grad_enabled():
            return
        if not model.has_owners:
            self._assign(model)
        model.passes.begin_forward(ddp)

    def end_forward(self, ddp: DistributedDataParallel, output: Any) -> None:
        """Watch the output of a forward; None if it has failed."""
        model = self._models.get(ddp)
        if model is not None and torch.is_grad_enabled():
            model.passes.end_forward(output)

    def rows_of(self, parameters: Any) -> list[torch.Tensor]:
        """Return this rank's rows of parameters, and the parameters that are in no DDP."""
        rows: list[torch.Tensor] = []
        followed = set[int]()
        for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
            model = self.model_of(parameter)
            if model is None or not model.has_owners:
                rows.append(parameter)
                continue
            if id(model) not in followed:
                model.passes.follow_cleared()
                followed.add(id(model))
            rows += model.rows.of(model.number(parameter))
        return rows

    def before_sum(self, call: ScriptCall) -> None:
        """Check that all ranks come to this call, which sums something over them. Collective.

        Raises:
            UserError: the ranks' scripts do different things.
        """
        all_rows = [model.rows for model in self.models() if model.has_owners]
        index, steps = (all_rows[0].index, all_rows[0].steps) if all_rows else (0, 0)
        self._calls.announce(call, index, steps)
        with self._calls.waiting(f"the other ranks' {call}"):
            pass

    def _note_parameters(self, model: OwnedModel) -> None:
        """Take note of the parameters that a model without owners has now."""
        for parameter in model.parameters:
            self._of_parameters.pop(id(parameter), None)
        model.follow_module()
        for parameter in model.parameters:
            self._of_parameters[id(parameter)] = weakref.ref(parameter), weakref.ref(model)

    def _assign(self, model: OwnedModel) -> None:
        """Choose the owners of a model, by the ranks' memory. Collective."""
        with self._waits("the other ranks' first forward"):
            sleeping_barrier(self.world.comm)  # one that is not there may read a deleted model
        self._free_deleted()
        # Sharded parameters refer to their rows, and these to the parameters, so deleted ones stay
        # until Python looks for such. It does so in time: small ones are not worth the wait.
        if self._deleted_bytes >= _COLLECTED_BYTES:
            gc.collect()
            self._deleted_bytes = 0
        self._note_parameters(model)
        optimizers = self.optimizers.of_model(model)
        for optimizer in optimizers:
            check_steps_by_parameter(optimizer)
        world = emulated(self.settings, self.world, model.module)
        with unlimited():  # until the rows that others own are freed
            owners = find_owners(self.settings, world, model.module, optimizers)
            if not owners.prefetches:  # memory is short
                world.device_kind.return_large_blocks()
            with self.placement.releasing(model.module) as give_rows:
                # Numbered here, as one rank alone may copy a model in its DDP.
                index = self._served.next_index(ReadKind.MODEL)
                model.assign(index, owners, optimizers, world.device, give_rows, self.state_dicts)
        self._served.add(ReadKind.MODEL, model.rows, of=model)
        print_rank_0(world, owners.text)
        for optimizer in optimizers:
            self.optimizers.own(optimizer)

    def _check_used(self) -> None:
        """Say at the script's end if there was nothing to shard."""
        if not self._has_models and self.settings.layout == "shard":
            print_rank_0(
                self.world,
                "--layout shard: nothing was sharded, as the script has put no model in "
                "DistributedDataParallel",
            )

    def _backward_done(self) -> None:
        """Free what is older than this backward, which no rank reads any more."""
        self.optimizers.end_backward()
        self._free_deleted()

    def _free_deleted(self) -> None:
        self._deleted_bytes += self._served.free_deleted()

    def _read_first(self, *numbers: int) -> Any:
        return self.reads.read(0, ReadKind.LENT, *numbers)

    def _serve(self, kind: int, index: int, *numbers: int) -> Any:
        """Answer another rank: see the `serve` of Placement and ServedRegistry."""
        if kind == ReadKind.LENT:
            return self.placement.serve(index, *numbers)
        return self._served.serve(kind, index, *numbers)
