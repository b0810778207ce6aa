"""A script's optimizer, of which this rank keeps and steps its own rows only."""

from __future__ import annotations

import copy
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.owned_model import OwnedModel
from kaitian_mpi.integrations.shard.owned_rows import copied_rows
from kaitian_mpi.integrations.shard.owner_reads import NOT_YET, OwnerReads
from kaitian_mpi.integrations.shard.owners_state import OwnersState
from kaitian_mpi.integrations.shard.state_pieces import (
    StateReader,
    row_pieces,
    state_pieces,
)
from kaitian_mpi.train.layouts.divided_state import number_groups
from kaitian_mpi.train.layouts.shard.row_states import count_rows, cut_state
from kaitian_mpi.train.layouts.shard.shards import steps_by_element

# An update of these is of several parameters together, or reads gradients outside of step().
_REFUSED = (
    *("LBFGS", "SAM", "ASAM", "Prodigy", "DAdapt", "ScheduleFree", "GaLore", "LOMO", "AdaLomo"),
    *("ZeroRedundancyOptimizer", "PostLocalSGD"),
)

_load_state_dict = Optimizer.load_state_dict  # before it is extended

FindModel = Callable[[torch.Tensor], "OwnedModel | None"]
Step = tuple[Optimizer, "OwnedOptimizer"]
"""An optimizer that is in a step, and what this rank has of it."""


class OwnedOptimizer:
    """This rank's side of an optimizer: its rows of the parameters, and their state.

    The optimizer shows the model's parameters, and the state of this rank's rows. Only within
    `step` it has these rows in place of the parameters.

    Attributes:
        index: among the optimizers, the same on every rank.
        models: that the optimizer steps.
        steps: how often the state has changed.
        has_begun: whether this rank keeps its rows.
    """

    def __init__(self, index: int, find_model: FindModel) -> None:
        """Keep nothing yet.

        Args:
            index: among the optimizers, the same on every rank.
            find_model: returns the model of a parameter; None if it is in no DDP.
        """
        self.index = index
        self.models: Sequence[OwnedModel] = ()
        self.steps = 0
        self._find_model = find_model
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        self._shown = RowsState(self)
        # By the steps: those before the script has loaded others, which other ranks may still read.
        self._before: dict[int, Mapping[Any, Any]] = {}
        self._whole: list[list[torch.Tensor]] = []
        self._depth = 0
        self._around: Sequence[Step] = ()  # until the end of this one's step
        self.has_begun = False
        self._lock = threading.RLock()
        # A whole state by place that was loaded before there were owners.
        self._loaded: Mapping[int, Any] | None = None

    @staticmethod
    def check(optimizer: Optimizer) -> None:
        """Check that an optimizer's parameters can be divided.

        Raises:
            UserError: it steps parameters together.
        """
        name = type(optimizer).__name__
        if any(name.startswith(refused) for refused in _REFUSED):
            raise UserError(
                f"--layout shard does not support {name}: its step is not of one parameter at a "
                "time; use another optimizer, or leave out --layout shard"
            )
        if not steps_by_element([optimizer]):
            warnings.warn(
                f"--layout shard: {name} is not known to step each element by itself, so each "
                "parameter is owned whole by one rank, and must be stepped by itself",
                stacklevel=2,
            )

    @property
    def is_inside(self) -> bool:
        """Whether the optimizer has this rank's rows now."""
        return self._depth > 0

    def enter(self, optimizer: Optimizer, around: Sequence[Step] | None = None) -> None:
        """Give the optimizer this rank's rows and their state, if there are owners yet.

        Args:
            optimizer: the optimizer.
            around: those whose steps call this one's, and were left for it, if a step begins.
        """
        self._depth += 1
        if self._depth > 1:
            return
        if around is not None:
            self._around = around
        for lock in self._locks():
            lock.acquire()
        if not self.has_begun:  # a closure may compute the first forward
            return
        self._whole = [group["params"] for group in optimizer.param_groups]
        optimizer.state = self._state
        for group in optimizer.param_groups:
            group["params"] = [*self._own(group["params"])]

    def leave(self, optimizer: Optimizer) -> None:
        """Let the optimizer show the model's parameters again."""
        self._depth -= 1
        if self._depth:
            return
        if self._whole:
            self._state = optimizer.state  # type: ignore[assignment]
            optimizer.state = self._shown
            for group, parameters in zip(optimizer.param_groups, self._whole, strict=True):
                group["params"] = parameters
            self._whole = []
        for lock in self._locks():
            lock.release()

    def end_step(self, optimizer: Optimizer) -> Sequence[Step]:
        """Take back this rank's rows, whose state has changed; return those around this step."""
        self.steps += 1
        for model in self.models:
            model.rows.end_step()
        around = self._around
        self._around = ()  # they may refer to this optimizer
        self.leave(optimizer)
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
        self.models = models
        if self.has_begun and not self.is_inside and optimizer.state is not self._shown:
            self._keep(optimizer, _by_place(optimizer))

    def own_state(self) -> defaultdict[Any, Any]:
        """Return the state of this rank's rows."""
        return self._state

    def clear_state(self) -> None:
        """Forget the state of this rank's rows, as the script has asked for on each rank."""
        with self._lock:
            self._before[self.steps] = self._state
            self._state = defaultdict(dict)
            self.steps += 1

    def load(self, optimizer: Optimizer, state: Mapping[str, Any], original: Any) -> None:
        """Load a whole `state_dict`, of which this rank keeps its rows. Not collective.

        Args:
            optimizer: the optimizer.
            state: as `state_dict` returns it; its tensors are on any device.
            original: torch's own `load_state_dict`.
        """
        original(optimizer, {**state, "state": {}})
        if self.has_begun:
            self._keep(optimizer, state["state"])
        else:
            self._loaded = state["state"]

    def state_dict(self, optimizer: Optimizer, original: Any, reads: OwnerReads) -> dict[str, Any]:
        """Return the whole `state_dict`, whose state is read from its owners when it is needed."""
        if not self.has_begun:
            content: dict[str, Any] = original(optimizer)
            content["state"] = dict(self._loaded or content["state"])
        else:
            optimizer.state = defaultdict(dict)
            try:
                content = original(optimizer)
            finally:
                optimizer.state = self._shown
            reader = StateReader(self, self.steps, parameters_of(optimizer), reads)
            content["state"] = OwnersState(reader.collect)
        return content

    def end_backward(self) -> None:
        """Take note that no rank reads the states of earlier steps any more."""
        self._before.clear()

    @contextmanager
    def own_pieces(self, index: int, steps: int, *wanted: int) -> Iterator[Any]:
        """Yield what this rank has of the state of a model's parameters, unchanged in the block.

        Args:
            index: of the model.
            steps: after which the state is wanted; this rank has done as many.
            wanted: the number of a parameter and the encoded name of a large tensor, of whose rows
                these are pieces; else they are a `StatePiece` of each part of a parameter.

        Raises:
            UserError: the state has changed since so many steps.
        """
        with self._lock:
            state = self._state if steps == self.steps else self._before.get(steps)
            if state is None:
                raise UserError(
                    "--layout shard: an optimizer's state_dict was read after the optimizer's next "
                    "step; read it before the next backward(), in the thread that trains, or keep "
                    "copy.deepcopy(state_dict)"
                )
            pieces_of = row_pieces if wanted else state_pieces
            models = [model for model in self.models if model.rows.index == index]
            yield [piece for model in models for piece in pieces_of(state, model, *wanted)]

    def serve(self, index: int, steps: int, *wanted: int) -> Any:
        """Return `own_pieces` to a rank that has done so many steps; `NOT_YET` if it is ahead."""
        with self._lock:
            if self.steps < steps:
                return NOT_YET
            with self.own_pieces(index, steps, *wanted) as pieces:
                # Copies of rows, as the script may change them while they are sent.
                return copied_rows(pieces) if wanted else [tuple(piece) for piece in pieces]

    def model_of(self, parameter: torch.Tensor) -> OwnedModel | None:
        """Return the model that a parameter is of; None if that is in no DDP."""
        return self._find_model(parameter)

    def whole_state(self, optimizer: Optimizer, original: Any, reads: OwnerReads) -> dict[Any, Any]:
        """Return the whole state by parameter, read from its owners. Not collective."""
        state = self.state_dict(optimizer, original, reads)["state"]
        order = enumerate(parameters_of(optimizer))
        return {parameter: state[place] for place, parameter in order if place in state}

    def _locks(self) -> list[Any]:
        return [self._lock, *(model.rows.lock for model in self.models)]

    def _own(self, parameters: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield this rank's rows of the parameters of a group."""
        for parameter in parameters:
            model = self._find_model(parameter)
            if model is None:
                yield parameter
            else:
                yield from model.rows.of(model.number(parameter))

    def _keep(self, optimizer: Optimizer, states: Mapping[int, Any]) -> None:
        """Keep this rank's rows of whole states by place."""
        targets: list[torch.Tensor] = []
        own: dict[int, Any] = {}
        for place, parameter in enumerate(parameters_of(optimizer)):
            model, state = self._find_model(parameter), states.get(place)
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
        self.enter(optimizer)
        self._before[self.steps] = self._state
        optimizer.state = defaultdict(dict)
        try:
            numbers = {id(target): n for n, target in enumerate(parameters_of(optimizer))}
            state = {numbers[id(targets[n])]: content for n, content in own.items()}
            groups = optimizer.param_groups
            numbered = number_groups(groups, [group["params"] for group in groups])
            _load_state_dict(optimizer, {"state": state, "param_groups": numbered})
            optimizer.param_groups = groups  # not copies, as the script may have kept them
            self.steps += 1
        finally:
            self.leave(optimizer)


class RowsState(defaultdict[Any, Any]):
    """What an optimizer shows as its `state` outside of `step`: that of this rank's rows.

    A loop over all of it may change each element. The state of a parameter is with several ranks.
    """

    def __init__(self, owned: OwnedOptimizer) -> None:
        """Show the state of an optimizer's rows on this rank."""
        super().__init__(dict)
        self._owned = owned

    def __getitem__(self, key: Any) -> Any:
        return self._owned.own_state()[self._checked(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._owned.own_state()[self._checked(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._owned.own_state()[self._checked(key)]

    def __contains__(self, key: Any) -> bool:
        return self._checked(key) in self._owned.own_state()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._owned.own_state())

    def __len__(self) -> int:
        return len(self._owned.own_state())

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter that is in no DDP."""
        return self._owned.own_state().get(self._checked(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Forget the state of a parameter that is in no DDP."""
        return self._owned.own_state().pop(self._checked(key), *default)

    def keys(self) -> Any:
        """Return this rank's rows."""
        return self._owned.own_state().keys()

    def values(self) -> Any:
        """Return the states of this rank's rows."""
        return self._owned.own_state().values()

    def items(self) -> Any:
        """Return this rank's rows and their states."""
        return self._owned.own_state().items()

    def clear(self) -> None:
        """Forget all state."""
        self._owned.clear_state()

    def _checked(self, key: Any) -> Any:
        if self._owned.model_of(key) is not None:
            raise UserError(
                "--layout shard: the state of a parameter is with the ranks that own its rows and "
                "cannot be read from optimizer.state; use optimizer.state_dict()"
            )
        return key


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
