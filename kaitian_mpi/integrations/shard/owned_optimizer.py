"""A script's optimizer, of which this rank keeps and steps its own rows only."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.lazy_optimizer_state import LazyOptimizerState
from kaitian_mpi.integrations.shard.local_optimizer_state import FindModel, LocalOptimizerState
from kaitian_mpi.integrations.shard.optimizer_state_view import OptimizerStateView
from kaitian_mpi.integrations.shard.owned_model import OwnedModel
from kaitian_mpi.integrations.shard.remote_reads import RemoteReads
from kaitian_mpi.integrations.shard.state_reader import StateReader
from kaitian_mpi.train.layouts.divided_state import number_groups
from kaitian_mpi.train.layouts.shard.row_states import count_rows, cut_state
from kaitian_mpi.train.layouts.shard.shards import steps_by_element

# An update of these is of several parameters together, or reads gradients outside of step().
_REFUSED = (
    *("LBFGS", "SAM", "ASAM", "Prodigy", "DAdapt", "ScheduleFree", "GaLore", "LOMO", "AdaLomo"),
    *("ZeroRedundancyOptimizer", "PostLocalSGD"),
)

_load_state_dict = Optimizer.load_state_dict  # before it is extended

Step = tuple[Optimizer, "OwnedOptimizer"]
"""An optimizer that is in a step, and what this rank has of it."""


def check_steps_by_parameter(optimizer: Optimizer) -> None:
    """Check that an optimizer's parameters can be divided.

    Raises:
        UserError: it steps parameters together.
    """
    name = type(optimizer).__name__
    if any(name.startswith(refused) for refused in _REFUSED):
        raise UserError(
            f"--layout shard does not support {name}: it steps several parameters together; "
            "use another optimizer, or leave out --layout shard"
        )
    if not steps_by_element([optimizer]):
        warnings.warn(
            f"--layout shard: {name} is not known to step each element by itself, so each "
            "parameter is owned whole by one rank; results are right only if a parameter's update "
            "depends on that parameter alone",
            stacklevel=2,
        )


class OwnedOptimizer:
    """This rank's side of an optimizer, which has this rank's rows within `step` only.

    Outside it shows the model's parameters, and the state of these rows.

    Attributes:
        state: the state of this rank's rows, which other ranks read.
        has_begun: whether this rank keeps its rows.
    """

    def __init__(self, index: int, find_model: FindModel) -> None:
        """Keep nothing yet.

        Args:
            index: the index among the optimizers, the same on every rank.
            find_model: returns the model of a parameter; None if it is in no DDP.
        """
        self.state = LocalOptimizerState(index, find_model)
        self._shown = OptimizerStateView(self.state)
        # Each group's parameters of the model, to be put back, while the optimizer has rows.
        self._whole: list[list[torch.Tensor]] = []
        self._nesting = 0  # of calls of `swap_in_rows`, of which the outermost one gives the rows
        # Optimizers whose steps have called this one's, and go on after it.
        self._around: Sequence[Step] = ()
        self.has_begun = False
        # A whole state by place that was loaded before there were owners: which rows of it are
        # this rank's is known only then.
        self._loaded: Mapping[int, Any] | None = None

    @property
    def models(self) -> Sequence[OwnedModel]:
        """The models that the optimizer steps."""
        return self.state.models

    @property
    def has_rows(self) -> bool:
        """Whether the optimizer has this rank's rows now."""
        return self._nesting > 0

    def swap_in_rows(self, optimizer: Optimizer, around: Sequence[Step] | None = None) -> None:
        """Give the optimizer this rank's rows and their state, if there are owners yet.

        Args:
            optimizer: the optimizer.
            around: those whose steps call this one's, and were left for it, if a step begins.
        """
        self._nesting += 1
        if self._nesting > 1:
            return
        if around is not None:
            self._around = around
        for lock in self._locks():
            lock.acquire()
        if not self.has_begun:  # a closure may compute the first forward
            return
        self._whole = [group["params"] for group in optimizer.param_groups]
        optimizer.state = self.state.current
        for group in optimizer.param_groups:
            group["params"] = [*self._own(group["params"])]

    def swap_out_rows(self, optimizer: Optimizer) -> None:
        """Let the optimizer show the model's parameters again."""
        self._nesting -= 1
        if self._nesting:
            return
        if self._whole:
            self.state.take_back(optimizer.state)  # type: ignore[arg-type]
            optimizer.state = self._shown  # type: ignore[assignment]
            for group, parameters in zip(optimizer.param_groups, self._whole, strict=True):
                group["params"] = parameters
            self._whole = []
        for lock in self._locks():
            lock.release()

    def end_step(self, optimizer: Optimizer) -> Sequence[Step]:
        """Take back this rank's rows, whose state has changed; return those around this step."""
        self.state.end_step()
        for model in self.models:
            model.rows.end_step()
        around = self._around
        self._around = ()  # they may refer to this optimizer
        self.swap_out_rows(optimizer)
        return around

    def begin(self, optimizer: Optimizer) -> None:
        """Keep this rank's rows of what was loaded, or made, before there were owners.

        Raises:
            UserError: it was made on meta, without values.
        """
        states = self._loaded or _by_place(optimizer)
        for state in states.values():
            if any(isinstance(value, torch.Tensor) and value.is_meta for value in state.values()):
                raise UserError(
                    f"--layout shard: the state of {type(optimizer).__name__} was created on meta; "
                    "create the optimizer after DistributedDataParallel"
                )
        self.has_begun = True
        self._keep(optimizer, states)
        self._loaded = None

    def follow(self, optimizer: Optimizer, models: Sequence[OwnedModel]) -> None:
        """Follow what the script has done to the optimizer: groups of other models, another state.

        Not collective.
        """
        self.state.set_models(models)
        given = optimizer.state
        if not self.has_begun or self.has_rows or given is self._shown:
            return
        with self.state.lock:
            self._keep(optimizer, _by_place(optimizer))
            rows = self._own(parameters_of(optimizer))
            # The script may have made it of what is shown, which is the state of rows.
            self.state.current.update({row: given[row] for row in rows if row in given})

    def load(self, optimizer: Optimizer, state: Mapping[str, Any], original: Any) -> None:
        """Load a whole `state_dict`, of which this rank keeps its rows. Not collective.

        Args:
            optimizer: the optimizer.
            state: as `state_dict` returns it; its tensors are on any device.
            original: torch's own `load_state_dict`.
        """
        state = {**state}  # a hook may change it
        for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            state = hook(optimizer, state) or state
        with _without_load_hooks(optimizer):
            original(optimizer, {**state, "state": {}})
        if self.has_begun:
            self._keep(optimizer, state["state"])
        else:
            self._loaded = state["state"]
        for end_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            end_hook(optimizer)

    def state_dict(self, optimizer: Optimizer, original: Any, reads: RemoteReads) -> dict[str, Any]:
        """Return the whole `state_dict`, whose state is read from its owners when it is needed."""
        if not self.has_begun:
            content: dict[str, Any] = original(optimizer)
            content["state"] = dict(self._loaded or content["state"])
        else:
            optimizer.state = defaultdict(dict)
            try:
                content = original(optimizer)
            finally:
                optimizer.state = self._shown  # type: ignore[assignment]
            reader = StateReader(self.state, parameters_of(optimizer), reads)
            content["state"] = LazyOptimizerState.collected_by(reader.collect)
        return content

    def whole_state(
        self, optimizer: Optimizer, original: Any, reads: RemoteReads
    ) -> dict[Any, Any]:
        """Return the whole state by parameter, read from its owners. Not collective."""
        state = self.state_dict(optimizer, original, reads)["state"]
        order = enumerate(parameters_of(optimizer))
        return {parameter: state[place] for place, parameter in order if place in state}

    def _locks(self) -> list[Any]:
        return [self.state.lock, *(model.rows.lock for model in self.models)]

    def _own(self, parameters: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield this rank's rows of the parameters of a group."""
        for parameter in parameters:
            model = self.state.find_model(parameter)
            if model is None:
                yield parameter
            else:
                yield from model.rows.of(model.number(parameter))

    def _keep(self, optimizer: Optimizer, states: Mapping[int, Any]) -> None:
        """Keep this rank's rows of whole states by place."""
        targets: list[torch.Tensor] = []
        own: dict[int, Any] = {}
        for place, parameter in enumerate(parameters_of(optimizer)):
            model, state = self.state.find_model(parameter), states.get(place)
            if model is None:
                targets.append(parameter)
                if state:
                    own[len(targets) - 1] = state
                continue
            whole = (place, 0, count_rows(parameter))
            for part, target in model.rows.parts_of(model.number(parameter)):
                targets.append(target)
                if state:
                    rows = cut_state(state, whole, (part.begin, part.end))
                    own[len(targets) - 1] = {name: _copied(value) for name, value in rows.items()}
        self.swap_in_rows(optimizer)
        self.state.replace(defaultdict(dict))
        optimizer.state = self.state.current
        try:
            numbers = {id(target): n for n, target in enumerate(parameters_of(optimizer))}
            state = {numbers[id(targets[n])]: content for n, content in own.items()}
            groups = optimizer.param_groups
            numbered = number_groups(groups, [group["params"] for group in groups])
            with _without_load_hooks(optimizer):
                _load_state_dict(optimizer, {"state": state, "param_groups": numbered})
            optimizer.param_groups = groups  # not copies, as the script may have kept them
        finally:
            self.swap_out_rows(optimizer)


@contextmanager
def _without_load_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Let the script's hooks of `load_state_dict` not see a part of a state in the block."""
    attributes = vars(optimizer)
    names = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    hooks = {name: attributes[name] for name in names}
    attributes.update({name: OrderedDict() for name in names})
    try:
        yield
    finally:
        attributes.update(hooks)


def _copied(value: Any) -> Any:
    """Return a copy of what a state has; of rows, not the memory of the whole, as a deepcopy is."""
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _by_place(optimizer: Optimizer) -> dict[int, Any]:
    """Return a whole state by its places in the `state_dict`."""
    order, state = enumerate(parameters_of(optimizer)), optimizer.state
    return {place: state[parameter] for place, parameter in order if parameter in state}


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters, in the order of their places in its `state_dict`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
