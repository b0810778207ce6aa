"""A script's optimizer, of which this rank keeps and steps its own rows only."""

from __future__ import annotations

import copy
import tempfile
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from kaitian_mpi.errors import UnsupportedError, UserError
from kaitian_mpi.integrations.shard.owned_model import OwnedModel
from kaitian_mpi.integrations.shard.owned_rows import OPTIMIZER, count_rows, in_order
from kaitian_mpi.integrations.shard.owner_reads import NOT_YET
from kaitian_mpi.integrations.shard.owners_state import OwnersState
from kaitian_mpi.observe.tensor_files import Spool
from kaitian_mpi.train.layouts.shard.shards import cut_state, join_states, steps_by_element

# An update of these is of several parameters together, or reads gradients outside of step().
_REFUSED = (
    *("LBFGS", "SAM", "ASAM", "Prodigy", "DAdapt", "ScheduleFree", "GaLore", "LOMO", "AdaLomo"),
    *("ZeroRedundancyOptimizer", "PostLocalSGD"),
)

_load_state_dict = Optimizer.load_state_dict  # before it is extended

FindModel = Callable[[torch.Tensor], "OwnedModel | None"]
Read = Callable[..., Any]


class OwnedOptimizer:
    """This rank's side of an optimizer: its rows of the parameters, and their state.

    The optimizer shows the model's parameters, and no state. Only within `step` it has this rank's
    rows and their state.

    Attributes:
        index: among the optimizers, the same on every rank.
        steps: how often the state has changed.
        has_begun: whether this rank keeps its rows.
    """

    def __init__(self, index: int, models: Sequence[OwnedModel], find_model: FindModel) -> None:
        """Keep nothing yet.

        Args:
            index: among the optimizers, the same on every rank.
            models: that the optimizer steps.
            find_model: returns the model of a parameter; None if it is in no DDP.
        """
        self.index = index
        self.models = models
        self.steps = 0
        self._find_model = find_model
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        self._shown: Any = None
        self._whole: list[list[torch.Tensor]] = []
        self._parameters: list[torch.Tensor] = []
        self._depth = 0
        self.has_begun = False
        self._lock = threading.RLock()
        # A whole state by place that was loaded before there were owners.
        self._loaded: Mapping[int, Any] | None = None

    @staticmethod
    def check(optimizer: Optimizer) -> None:
        """Check that an optimizer's parameters can be divided.

        Raises:
            UnsupportedError: it steps parameters together.
        """
        name = type(optimizer).__name__
        if any(name.startswith(refused) for refused in _REFUSED):
            raise UnsupportedError(
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

    def enter(self, optimizer: Optimizer) -> None:
        """Give the optimizer this rank's rows and their state."""
        self._depth += 1
        if self._depth > 1:
            return
        for lock in self._locks():
            lock.acquire()
        self._parameters = parameters_of(optimizer)
        self._whole = [group["params"] for group in optimizer.param_groups]
        self._shown = optimizer.state
        optimizer.state = self._state
        for group in optimizer.param_groups:
            group["params"] = [*self._own(group["params"])]

    def leave(self, optimizer: Optimizer) -> None:
        """Let the optimizer show the model's parameters again."""
        self._depth -= 1
        if self._depth:
            return
        self._state = optimizer.state  # type: ignore[assignment]
        optimizer.state = self._shown
        for group, parameters in zip(optimizer.param_groups, self._whole, strict=True):
            group["params"] = parameters
        self._whole = []
        for lock in self._locks():
            lock.release()

    def end_step(self, optimizer: Optimizer) -> None:
        """Take back this rank's rows, whose state has changed."""
        self.steps += 1
        for model in self.models:
            model.rows.end_step()
        self.leave(optimizer)

    def begin(self, optimizer: Optimizer) -> None:
        """Keep this rank's rows of what was loaded, or made, before there were owners."""
        if optimizer.state:
            order = enumerate(parameters_of(optimizer))
            self._loaded = {n: optimizer.state[p] for n, p in order if p in optimizer.state}
            optimizer.state = defaultdict(dict)
        self.has_begun = True
        self._keep(optimizer, self._loaded or {})
        self._loaded = None

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

    def state_dict(self, optimizer: Optimizer, original: Any, read: Read) -> dict[str, Any]:
        """Return the whole `state_dict`, whose state is read from its owners when it is needed."""
        content: dict[str, Any] = original(optimizer)
        if not self.has_begun:
            content["state"] = dict(self._loaded or content["state"])
        else:
            owners = sorted({owner for model in self.models for owner in model.rows.owners()})
            parameters = parameters_of(optimizer)
            collect = partial(self._collect, read, owners, self.steps, parameters)
            content["state"] = OwnersState(collect)
        return content

    def serve(self, place: int, steps: int) -> Any:
        """Return this rank's rows of the state of a parameter, by its place in the groups.

        Raises:
            UserError: the state has changed since so many steps.
        """
        with self._lock:
            if self.steps < steps:
                return NOT_YET
            if self.steps > steps:
                raise UserError(
                    f"--layout shard: the optimizer's state of step {steps} was read when a rank "
                    f"had done step {self.steps}; read it before the next step, and not from "
                    "another thread"
                )
            parameter = self._parameters[place]
            model = self._find_model(parameter)
            if model is None:
                return [(0, count_rows(parameter), dict(self._state.get(parameter, {})))]
            return [
                (part.begin, part.end, dict(self._state[target]))
                for part, target in model.rows.parts_of(model.number(parameter))
                if target in self._state
            ]

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

    def _collect(
        self,
        read: Read,
        owners: Sequence[int],
        steps: int,
        parameters: Sequence[torch.Tensor],
    ) -> dict[int, Any]:
        spool = Spool(Path(tempfile.gettempdir()))
        states = {}
        for place in range(len(parameters)):
            pieces = [
                piece
                for rank in owners
                for piece in read(rank, OPTIMIZER, self.index, place, steps)
            ]
            if pieces:  # else no rank has stepped it
                ordered = in_order(pieces, parameters[place])
                states[place] = join_states([state for *_, state in ordered], spool.keep)
        if spool.fault is not None:
            raise UserError(
                f"--layout shard: the optimizer's state cannot be collected in "
                f"{tempfile.gettempdir()} ({spool.fault.strerror}); set TMPDIR to a folder with "
                "room"
            )
        return states

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
                    own[len(targets) - 1] = copy.deepcopy(rows)
        self.enter(optimizer)
        try:
            numbers = {id(target): n for n, target in enumerate(parameters_of(optimizer))}
            state = {numbers[id(targets[n])]: content for n, content in own.items()}
            groups, at = [], 0
            for group in optimizer.param_groups:
                count = len(group["params"])
                groups.append({**group, "params": [*range(at, at + count)]})
                at += count
            _load_state_dict(optimizer, {"state": state, "param_groups": groups})
            self.steps += 1
        finally:
            self.leave(optimizer)


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters, in the order of their places in its `state_dict`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
