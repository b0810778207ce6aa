"""A model in DistributedDataParallel whose gradients are summed to the owners of their rows."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.pending_parameter import is_compiling
from kaitian_mpi.distributed.sharded_model import IS_COMPILED
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.budget import Owners
from kaitian_mpi.integrations.shard.early_state_dicts import EarlyStateDicts
from kaitian_mpi.integrations.shard.open_gathering import OpenGathering
from kaitian_mpi.integrations.shard.open_reducer import OpenReducer
from kaitian_mpi.integrations.shard.owned_rows import OwnedRows
from kaitian_mpi.integrations.shard.owner_reads import OwnerReads
from kaitian_mpi.integrations.shard.placement import GiveRows
from kaitian_mpi.integrations.shard.remote_gradient import RemoteGradients
from kaitian_mpi.integrations.shard.script_calls import ScriptCall, ScriptCalls
from kaitian_mpi.integrations.shard.script_parameters import ScriptParameters
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.layouts.shard.shards import divide_parameters, steps_by_element

Waits = Callable[[str], AbstractContextManager[Any]]


@not_compiled
class OwnedModel:
    """The forwards and backwards of a model whose rows have owners.

    `.grad` of a parameter is a `RemoteGradient` if some rank has computed a gradient since the
    script has cleared it, else None.

    Attributes:
        parameters: of the model, by their numbers.
        rows: this rank's, which its optimizers step.
        sharded: the parameters that no rank has whole; None if all are whole on each.
        sums: of the gradients, at their owners; None until `assign`.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        world: World,
        reads: OwnerReads,
        waits: Waits,
        calls: ScriptCalls,
        backward_done: Callable[[], None],
    ) -> None:
        """Watch the model in a DDP, whose ranks own nothing yet. Not collective.

        Args:
            ddp: the wrapped model.
            world: all ranks.
            reads: from other ranks.
            waits: makes the context of waiting for other ranks.
            calls: compares what the ranks' scripts do.
            backward_done: called when all ranks have computed a backward.
        """
        self.parameters = list(ddp.module.parameters())
        self.rows = OwnedRows(self.parameters, world.rank, reads, waits)
        self.sharded: ScriptParameters | None = None
        self.sums: OpenReducer | None = None
        self._module = weakref.ref(ddp.module)
        self._world = world
        self._backward_done = backward_done
        self._numbers = {id(p): number for number, p in enumerate(self.parameters)}
        self._by_rows = True
        self._calls = calls
        self._group = ddp.process_group
        self._prefetches = False
        # Whether the last forward's backward ends a step; None if a backward has followed it.
        self._syncs: bool | None = None
        # By the numbers of parameters that forwards have returned: whether the backward ends a step
        self._returned: dict[int, bool] = {}
        self._gradients = RemoteGradients(self.parameters, self._gradients_of)

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
        self.parameters[:] = self.module.parameters()  # its rows and gradients are of this list
        self._numbers = {id(p): number for number, p in enumerate(self.parameters)}

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
            index: of this model, the same on every rank.
            owners: of which fractions.
            optimizers: those that step the model.
            device: for parameters that have stayed on the host so far.
            give_rows: gives this rank what rank 0 alone has so far.
            state_dicts: that the script has made so far.
        """
        self._prefetches = owners.prefetches
        self._by_rows = steps_by_element(optimizers)
        # Some are still on the host on some ranks, and the parts must be the same on all.
        alike = [
            nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in self.parameters
        ]
        parts = divide_parameters(
            alike,
            stepped=range(len(self.parameters)),
            owned=owners.sharded,
            pairs=owners.pairs,
            by_rows=self._by_rows,
        )
        values = give_rows(parts, owners.sharded)
        if owners.sharded:
            self.sharded = ScriptParameters(
                self.module,
                owners.sharded,
                device,
                read_into=self.rows.read,
                read_version=self.rows.version,
                write=self.rows.write,
            )
            early = state_dicts.by_parameter(self.module, owners.sharded)
            keys = [(p.parameter, p.begin, p.end) for p in parts if p.owner == self._world.rank]
            for number in owners.sharded:  # a graph that has kept its values then fails
                torch.autograd.graph.increment_version(self.parameters[number])
            rank_rows = self.sharded.shard([key for key in keys if key not in values])
            values |= {key: rows for key, rows in rank_rows.items() if key[0] in owners.sharded}
            for number, tensors in early.items():
                for tensor in tensors:
                    self.sharded.let_follow(number, tensor)
        elif len({parameter.device for parameter in self.parameters}) > 1:
            self.module.to(device)
        self.rows.assign(index, parts, values)
        self._make_reducer()

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

    def begin_forward(self, syncs: bool) -> None:
        """Take note of a forward with gradients; whether its backward ends a step or adds."""
        assert self.sums is not None
        _check_no_backward(self.sums, self._world.rank, self.rows.steps)
        _check_none_added(self.module, self._numbers)
        if self._syncs is None:
            self._returned.clear()
        if self.sums.is_outdated:
            _check_order(self.module, self.parameters)
            if self.sums.has_begun and self._gradients.kept():
                raise UserError(
                    "--layout shard: a parameter requires gradients now that did not in the last "
                    "backward; freeze and unfreeze parameters only after optimizer.step()"
                )
            self._check_values()
            self.sums.close()
            self._make_reducer()
            self.sums.keep(self._gradients.kept())
        if self.sharded is not None and self.sums.gathering is not None:
            if is_compiling() and _is_called_by_compiled_code():
                raise UserError(IS_COMPILED)
            self.sharded.begin_forward(self.sums.gathering, is_first=self._syncs is None)
        self._syncs = syncs

    def end_forward(self, output: Any) -> None:
        """Begin to sum when the first gradient of a forward's output is known.

        Not in the forward: a script may clear gradients between that and its backward.
        """
        if self.sharded is not None:
            self.sharded.end_forward()
        begin = partial(self._begin_backward, bool(self._syncs))
        for tensor in _tensors_in(output):
            if id(tensor) in self._numbers:
                self._returned[self.number(tensor)] = bool(self._syncs)
            elif tensor.requires_grad:
                tensor.register_hook(begin)

    def see_gradient(self, number: int, gradient: torch.Tensor) -> None:
        """Begin to sum if a parameter that a forward has returned has the first gradient.

        Raises:
            UserError: the gradient is not of a forward.
        """
        if self.sums is None or self.sums.is_armed:
            return
        if number not in self._returned:
            raise UserError(
                "--layout shard: a gradient was computed without the forward of "
                "DistributedDataParallel, or from an output in which no tensor is found; call the "
                "wrapped model, and return tensors, or dicts, tuples, lists or dataclasses of them"
            )
        self._begin_backward(self._returned[number], gradient)

    def before_step(self) -> None:
        """Let this rank's rows follow what the script has done to parameters and gradients.

        Waits until all ranks come to their step: one that is still before it may read these rows,
        which the step changes. Collective.
        """
        if self.sums is None:
            self._gradients.cleared()  # none that the script has set
            return
        _check_no_backward(self.sums, self._world.rank, self.rows.steps)
        self._announce(ScriptCall.STEP)
        with self._calls.waiting("the other ranks' step"):
            self._check_values()
        self.rows.follow_data()
        self.follow_cleared()

    def follow_cleared(self) -> None:
        """Clear the gradients of this rank's rows that the script has cleared. Not collective.

        Raises:
            UserError: the others are not summed yet.
        """
        assert self.sums is not None
        self.rows.clear(self._gradients.cleared())
        if not self.sums.is_complete and self._gradients.kept():
            raise UserError(
                "--layout shard: gradients of a backward under no_sync() were stepped or clipped, "
                "but each rank has only its own; leave no_sync() for a step's last micro-batch"
            )

    def after_step(self) -> None:
        """Give all ranks the new values of whole parameters. Collective."""
        if self.sums is not None:
            self.sums.share_values()

    def _begin_backward(self, syncs: bool, _: torch.Tensor) -> None:
        assert self.sums is not None
        if self.sums.is_armed:
            return
        if torch.is_grad_enabled():
            raise UserError(
                "--layout shard does not support gradients of gradients (create_graph=True); "
                "give --layout replicate"
            )
        self._syncs = syncs
        self._announce(ScriptCall.SUM if syncs else ScriptCall.ADD)
        self.sums.begin(1 / self._world.size, self._gradients.cleared())
        self._gradients.hide(self.sums.numbers)  # autograd shall not add to them
        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        assert self.sums is not None
        assert self._syncs is not None
        is_last = self._syncs
        self._syncs = None
        if self.sharded is not None:
            self.sharded.end_backward()
        self.sums.complete(is_last, self._calls.check)
        if is_last:  # of one that only adds, a rank that owns nothing may see the end before others
            self.rows.end_backward()
            self._backward_done()
        self._gradients.show(self.sums.numbers_used())

    def _gradients_of(self, number: int) -> list[torch.Tensor]:
        assert self.sums is not None
        if self.sums.is_complete:
            return self.rows.gradients(number)
        return self.sums.gradients(number)

    def _announce(self, call: ScriptCall) -> None:
        self._calls.announce(call, self.rows.index, self.rows.steps)

    def _check_values(self) -> None:
        assert self.sums is not None
        self._calls.check()
        self.sums.check_values()

    def _make_reducer(self) -> None:
        gathering = None
        if self.sharded is not None:
            exchange = partial(gather_values, self._world.comm)
            gathering = OpenGathering(
                self.sharded,
                self.rows.parts,
                self.rows.targets,
                exchange,
                read_version=self.rows.version,
                group=self._group,
                waits=self._calls.waiting_in_round,
                prefetches=self._prefetches,
            )
        self.sums = OpenReducer(
            self.module,
            parts=self.rows.parts,
            targets=self.rows.targets,
            gathering=gathering,
            overlaps=self._prefetches,
            group=self._group,
            waits=self._calls.waiting,
        )
        for number, parameter in enumerate(self.parameters):
            if parameter.requires_grad:  # the hook is called before autograd adds to `.grad`
                parameter.register_hook(_SeeGradient(self, number))


def _is_called_by_compiled_code() -> bool:
    """Return whether a DDP was compiled, rather than anything else in the process."""
    frame = inspect.currentframe()
    while frame is not None:
        if Path(frame.f_code.co_filename).parent.name == "_dynamo":
            return True
        frame = frame.f_back
    return False


def _check_no_backward(sums: OpenReducer, rank: int, steps: int) -> None:
    """Check that no backward is under way.

    Args:
        sums: of the model's gradients.
        rank: this rank.
        steps: of optimizers so far.

    Raises:
        UserError: it has failed, or this is in one of its hooks.
    """
    if not sums.is_armed:
        return
    if torch._C._current_graph_task_id() != -1:
        raise UserError(
            "--layout shard: a model computes or is stepped in a hook of its own backward, when "
            "the ranks' gradients are not summed yet; do it after backward()"
        )
    raise UserError(
        f"--layout shard: a backward has failed on rank {rank} after {steps} optimizer steps, so "
        "the gradients are not summed; let the error end the job"
    )


def _check_order(module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Check that a model's parameters have the numbers that they had at its first forward.

    Raises:
        UserError: the script has added, removed or moved some.
    """
    if [*map(id, module.parameters())] != [*map(id, parameters)]:
        raise UserError(
            "--layout shard: parameters were frozen or unfrozen after others were added, removed, "
            "tied or pruned; do the latter before the model's first forward"
        )


def _check_none_added(module: nn.Module, numbers: Mapping[int, int]) -> None:
    """Check that a model has no parameters whose gradients are not summed.

    Args:
        module: the model.
        numbers: of its parameters, by `id`, at its first forward.

    Raises:
        UserError: the script has added some.
    """
    if not any(id(parameter) not in numbers for parameter in _parameters_in(module)):
        return
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in numbers:
            raise UserError(
                f"--layout shard: {name} is another tensor than in the model's first forward, and "
                "DistributedDataParallel does not sum its gradient; replace or add parameters "
                "before, load them without assign=True, and use functional_call on the module that "
                "is wrapped"
            )


def _parameters_in(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module, some of them twice: ten times faster than torch does."""
    left = [module]
    seen = {id(module)}
    while left:
        module = left.pop()
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                left.append(child)


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a forward has returned."""
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors_in([*leaf.values()])
        elif dataclasses.is_dataclass(leaf):
            yield from _tensors_in([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])


@not_compiled
class _SeeGradient:
    """A hook of a parameter, called with each gradient."""

    def __init__(self, model: OwnedModel, number: int) -> None:
        self._model = weakref.ref(model)  # else a parameter would keep itself
        self._number = number

    def __call__(self, gradient: torch.Tensor) -> None:
        model = self._model()
        if model is not None:
            model.see_gradient(self._number, gradient)
