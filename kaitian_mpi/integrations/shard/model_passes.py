"""The forwards, backwards and steps of a model whose rows have owners."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.pending_parameter import is_compiling
from kaitian_mpi.distributed.sharded_model import IS_COMPILED
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.local_rows import LocalRows
from kaitian_mpi.integrations.shard.open_gathering import OpenGathering
from kaitian_mpi.integrations.shard.open_reducer import OpenReducer
from kaitian_mpi.integrations.shard.remote_gradient import RemoteGradients
from kaitian_mpi.integrations.shard.script_calls import ScriptCall, ScriptCalls
from kaitian_mpi.integrations.shard.script_parameters import ScriptParameters
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World


@not_compiled
class ModelPasses:
    """Sums the gradients of a script's backwards to their owners, and shares what these have made.

    `.grad` of a parameter is a `RemoteGradient` if some rank has computed a gradient since the
    script has cleared it, else None.

    Attributes:
        sums: the sums of the gradients, at their owners; None until `begin`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        numbers: Mapping[int, int],
        rows: LocalRows,
        world: World,
        calls: ScriptCalls,
        backward_done: Callable[[], None],
    ) -> None:
        """Watch nothing yet. Not collective.

        Args:
            parameters: those of the model, by their numbers.
            numbers: the numbers of the parameters, by `id`.
            rows: the rows of this rank.
            world: all ranks.
            calls: compares what the ranks' scripts do.
            backward_done: called when all ranks have computed a backward.
        """
        self.sums: OpenReducer | None = None
        self._parameters = parameters
        self._numbers = numbers
        self._rows = rows
        self._world = world
        self._calls = calls
        self._backward_done = backward_done
        self._sharded: ScriptParameters | None = None
        self._prefetches = False
        # Whether the last forward's backward ends a step; None if a backward has followed it.
        self._syncs: bool | None = None
        # By the numbers of parameters that forwards have returned: whether the backward ends a step
        self._returned: dict[int, bool] = {}
        self._watched: set[int] = set()  # the numbers of the parameters that have a hook
        # By a weak reference: the rows are views of parameters, whose `.grad` would else keep them.
        self._gradients = RemoteGradients(parameters, partial(_gradients_of, weakref.ref(self)))

    def begin(
        self, module: nn.Module, group: Any, sharded: ScriptParameters | None, prefetches: bool
    ) -> None:
        """Watch the model, whose rows have owners now. Not collective.

        Args:
            module: the model.
            group: the process group of its DDP.
            sharded: the parameters that no rank has whole; None if all are whole on each.
            prefetches: whether there is memory for values that come before they are used.
        """
        self._sharded = sharded
        self._prefetches = prefetches
        self.sums = self._make_reducer(module, group)

    def begin_forward(self, ddp: DistributedDataParallel) -> None:
        """Take note of a forward with gradients; whether its backward ends a step or adds."""
        assert self.sums is not None
        _check_no_backward(self.sums, self._world.rank, self._rows.steps)
        _check_none_added(ddp.module, self._numbers)
        if self._syncs is None:
            self._returned.clear()
        if self.sums.is_outdated:
            _check_order(ddp.module, self._parameters)
            if self.sums.has_begun and self._gradients.kept():
                raise UserError(
                    "--layout shard: a parameter requires gradients now that did not in the last "
                    "backward; freeze and unfreeze parameters only after optimizer.step()"
                )
            self._check_values()
            self.sums.close()
            self.sums = self._make_reducer(ddp.module, ddp.process_group)
            self.sums.keep(self._gradients.kept())
        if self._sharded is not None and self.sums.gathering is not None:
            if is_compiling() and _is_called_by_compiled_code():
                raise UserError(IS_COMPILED)
            self._sharded.begin_forward(self.sums.gathering, is_first=self._syncs is None)
        self._syncs = ddp.require_backward_grad_sync

    def end_forward(self, output: Any) -> None:
        """Begin to sum when the first gradient of a forward's output is known.

        Not in the forward: a script may clear gradients between that and its backward.
        """
        if self._sharded is not None:
            self._sharded.end_forward()
        begin = partial(self._begin_backward, bool(self._syncs))
        for tensor in _tensors_in(output):
            if id(tensor) in self._numbers:
                self._returned[self._numbers[id(tensor)]] = bool(self._syncs)
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
        _check_no_backward(self.sums, self._world.rank, self._rows.steps)
        self._announce(ScriptCall.STEP)
        with self._calls.waiting("the other ranks' step"):
            self._check_values()
        self._rows.follow_data()
        self.follow_cleared()

    def follow_cleared(self) -> None:
        """Clear the gradients of this rank's rows that the script has cleared. Not collective.

        Raises:
            UserError: the others are not summed yet.
        """
        assert self.sums is not None
        self._rows.clear(self._gradients.cleared())
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
        if self._sharded is not None:
            self._sharded.end_backward()
        self.sums.complete(is_last, self._calls.check)
        if is_last:  # of one that only adds, a rank that owns nothing may see the end before others
            self._rows.end_backward()
            self._backward_done()
        self._gradients.show(self.sums.numbers_used())

    def gradients_of(self, number: int) -> list[torch.Tensor]:
        """Return this rank's rows of the sum of a parameter's gradient. Not collective."""
        assert self.sums is not None
        if self.sums.is_complete:
            return self._rows.gradients(number)
        return self.sums.gradients(number)

    def _announce(self, call: ScriptCall) -> None:
        self._calls.announce(call, self._rows.index, self._rows.steps)

    def _check_values(self) -> None:
        assert self.sums is not None
        self._calls.check()
        self.sums.check_values()

    def _make_reducer(self, module: nn.Module, group: Any) -> OpenReducer:
        for number, parameter in enumerate(self._parameters):
            if parameter.requires_grad and number not in self._watched:
                self._watched.add(number)
                # The hook is called before autograd adds to `.grad`.
                parameter.register_hook(_SeeGradient(self, number))
        gathering = None
        if self._sharded is not None:
            exchange = partial(gather_values, self._world.comm)
            gathering = OpenGathering(
                self._sharded,
                self._rows.parts,
                self._rows.targets,
                exchange,
                read_version=self._rows.version,
                group=group,
                waits=self._calls.waiting_in_round,
                prefetches=self._prefetches,
            )
        return OpenReducer(
            module,
            parts=self._rows.parts,
            targets=self._rows.targets,
            gathering=gathering,
            overlaps=self._prefetches,
            group=group,
            waits=self._calls.waiting,
        )


def _gradients_of(ref: weakref.ref[ModelPasses], number: int) -> list[torch.Tensor]:
    passes = ref()
    if passes is None:
        raise UserError(
            "--layout shard: a gradient is used after its DistributedDataParallel and the "
            "optimizers were deleted; delete them later, or set .grad to None"
        )
    return passes.gradients_of(number)


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
        sums: the sums of the model's gradients.
        rank: this rank.
        steps: how many optimizer steps there were so far.

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
        numbers: the numbers of its parameters, by `id`, at its first forward.

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

    def __init__(self, passes: ModelPasses, number: int) -> None:
        self._passes = weakref.ref(passes)  # else a parameter would keep itself
        self._number = number

    def __call__(self, gradient: torch.Tensor) -> None:
        passes = self._passes()
        if passes is not None:
            passes.see_gradient(self._number, gradient)
