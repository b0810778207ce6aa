"""A state of which each rank has a part: what layouts shard and pipeline have in common."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from kaitian_mpi.train.partition import Partition

Target = TypeVar("Target")
"""The key of a tensor that this rank's optimizers step."""


class DividedState(Partition, Generic[Target]):
    """The part of a model's parameters, and of its optimizers, on this rank.

    The optimizers are the user's own; their groups have what this rank steps in the place of the
    parameters.
    """

    is_whole = False

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], owned: frozenset[int]
    ) -> None:
        """Number the parameters in the order of `parameters()`, without a target as yet.

        `owned` are those of which only some ranks have the values.
        """
        super().__init__(model, optimizers)
        self._parameters = list(model.parameters())
        numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        self._groups = [
            [[numbers[p] for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in optimizers
        ]
        self.owned = owned
        self._names = {
            name: numbers[parameter]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if numbers[parameter] in owned
        }
        self.targets: dict[Target, nn.Parameter] = {}
        """The tensors that this rank's optimizers step."""

    @abstractmethod
    def _keep(
        self, states: Mapping[int, dict[str, Any]], values: Mapping[int, torch.Tensor]
    ) -> None:
        """Keep a whole state, by the parameters' numbers, until ranks have their parts."""

    def take(
        self, model: dict[str, Any], optimizers: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Keep whole optimizers' states, and whole owned values, to be given to their ranks.

        Raises:
            ValueError: a value has another shape.
        """
        model, values = self._without_values(model)
        self.drop()
        self._keep(self._by_number(optimizers), values)
        return model, [{**content, "state": {}} for content in optimizers]

    def _by_number(self, optimizers: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return the states in whole optimizers' `state_dict`, by the parameters' numbers."""
        return {
            number: content["state"].get(place, {})
            for content, groups in zip(optimizers, self._groups, strict=True)
            for place, number in enumerate(number for group in groups for number in group)
        }

    def drop(self) -> None:
        """Forget all state, as it is incomplete. Not collective."""
        self.zero_gradients()
        for optimizer in self._optimizers:
            optimizer.state.clear()
            for group in optimizer.param_groups if self.targets else ():
                group["params"] = []  # until there are new parts
        self.targets = {}

    def zero_gradients(self) -> None:
        """Free the gradients of what this rank steps."""
        for target in self.targets.values():
            target.grad = None

    def follow_data(self) -> None:
        """Let the targets be parts of parameters again whose `data` was set since.

        Not collective.
        """

    def wait_for_values(self) -> None:
        """Wait until the values are here that other ranks have sent. Not collective."""

    def optimizer_states(self) -> list[dict[str, Any]]:
        """Return the optimizers' `state_dict` as if they had all parameters, without any state."""
        return [
            {"state": {}, "param_groups": number_groups(optimizer.param_groups, groups)}
            for optimizer, groups in zip(self._optimizers, self._groups, strict=True)
        ]

    def _with_states(self, states: Mapping[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the whole optimizers' `state_dict` with these states, by parameters' numbers."""
        optimizers = self.optimizer_states()
        for content, groups in zip(optimizers, self._groups, strict=True):
            order = enumerate(number for group in groups for number in group)
            content["state"] = {place: states[number] for place, number in order if states[number]}
        return optimizers

    def model_state(self) -> dict[str, Any]:
        return self._with_values({})

    def _with_values(self, values: Mapping[int, torch.Tensor]) -> dict[str, Any]:
        """Return the model's `state_dict` with owned values by number, else empty tensors."""
        self.wait_for_values()
        return self._replace_values(super().model_state(), values)

    def _replace_values(
        self, state: dict[str, Any], values: Mapping[int, torch.Tensor]
    ) -> dict[str, Any]:
        changed = copy.copy(state)  # with the versions of the model's parts
        for name, number in self._names.items():
            changed[name] = values.get(number, torch.empty(0))
        return changed

    def _without_values(
        self, state: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[int, torch.Tensor]]:
        """Return a model's `state_dict` with empty tensors for owned values, and these by number.

        Raises:
            ValueError: the values have another shape.
        """
        values: dict[int, torch.Tensor] = {}
        for name, number in self._names.items():
            value = state.get(name)
            if value is not None and value.numel():
                if value.shape != self._parameters[number].shape:
                    raise ValueError(f"{name} has the shape {list(value.shape)}")
                values[number] = value
        return self._replace_values(state, {}), values

    def load(self, model: dict[str, Any], optimizers: Sequence[Mapping[str, Any]]) -> None:
        """Load results of `model_state` and `optimizer_states`: all but what is divided."""
        self._load_model(model)
        self._load_settings(optimizers)

    def _load_model(self, state: dict[str, Any]) -> None:
        content = copy.copy(state)
        owned = self._names.keys()
        missing = {name for name in owned if content.pop(name, None) is None}
        result = self._model.load_state_dict(content, strict=not owned)
        missing |= set(result.missing_keys) - owned
        if missing or result.unexpected_keys:
            names = ", ".join([*sorted(missing), *result.unexpected_keys])
            raise RuntimeError(f"its parameters differ: {names}")

    def _load_settings(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the settings of `optimizer_states`, of this rank or another.

        Raises:
            ValueError: they are of other groups.
        """
        for optimizer, groups, state in zip(self._optimizers, self._groups, states, strict=True):
            lengths = [len(group["params"]) for group in state["param_groups"]]
            if lengths != [len(group) for group in groups]:
                raise ValueError("the optimizer's groups have other parameters")
            content = optimizer.state_dict()
            for group, saved in zip(content["param_groups"], state["param_groups"], strict=True):
                group.update({name: saved[name] for name in saved if name != "params"})
            optimizer.load_state_dict(content)

    def _restrict(
        self, targets: Mapping[int, Sequence[tuple[nn.Parameter, dict[str, Any]]]]
    ) -> None:
        """Let the optimizers step these only, by the parameter's number, with these states."""
        for optimizer, groups, setting in zip(
            self._optimizers, self._groups, self.optimizer_states(), strict=True
        ):
            optimizer.state.clear()
            place = 0
            content = dict[int, Any]()
            for group, numbers, saved in zip(
                optimizer.param_groups, groups, setting["param_groups"], strict=True
            ):
                pairs = [pair for number in numbers for pair in targets.get(number, ())]
                group["params"] = [target for target, _ in pairs]
                saved["params"] = [*range(place, place + len(pairs))]
                content |= {place + i: state for i, (_, state) in enumerate(pairs) if state}
                place += len(pairs)
            setting["state"] = content
            optimizer.load_state_dict(setting)

    def _state_of(self, target: nn.Parameter) -> dict[str, Any]:
        """Return the optimizer's state of what it steps; empty if there is none yet."""
        for optimizer in self._optimizers:
            if target in optimizer.state:
                return dict(optimizer.state[target])
        return {}


def number_groups(
    groups: Sequence[Mapping[str, Any]], parameters: Sequence[Sequence[Any]]
) -> list[dict[str, Any]]:
    """Return an optimizer's groups, as in its `state_dict`, with the places of their parameters."""
    numbered = []
    place = 0
    for group, of_group in zip(groups, parameters, strict=True):
        settings = {name: value for name, value in group.items() if name != "params"}
        numbered.append({**settings, "params": [*range(place, place + len(of_group))]})
        place += len(of_group)
    return numbered
