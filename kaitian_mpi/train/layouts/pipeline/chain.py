"""A model as a chain of layers, and the user's loss around a part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from kaitian_mpi.errors import UserError
from kaitian_mpi.train.task import Task

_PLAIN = (int, float, bool, str, type(None))
_Place = tuple[nn.Module, str]  # a module's parent, and its name there


class ModelCall(NamedTuple):
    """A loss's call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StoppedError(BaseException):  # no handler of the user's, or the model's, catches it
    """Ends a call of the model once its result is known."""


class _ModelProxy:
    """Stands in for the model in the user's function, as no rank has all layers."""

    def __init__(self, model: nn.Module, answer: Callable[[ModelCall], Any]) -> None:
        self._model = model
        self._answer = answer
        self._calls = 0
        self.training = model.training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._calls > 1:
            raise UserError(
                "--layout pipeline: the loss, or metrics, calls the model more than once; it must "
                "call it once for a batch"
            )
        return self._answer(ModelCall(args, kwargs))

    def __getitem__(self, key: Any) -> Any:
        raise self._used(f"model[{key!r}]")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        is_part = isinstance(value, nn.Module | torch.Tensor)
        if is_part or getattr(value, "__self__", None) is self._model:
            raise self._used(f"model.{name}")
        return value

    @staticmethod
    def _used(access: str) -> UserError:
        return UserError(
            f"--layout pipeline: the loss, or metrics, uses {access}; it must use the model by "
            "calling it, once for a batch: no rank has all layers"
        )


def capture_call(function: Callable[[Any, Any], Any], model: nn.Module, batch: Any) -> ModelCall:
    """Return a user's function's call of the model for a batch."""

    def stop(call: ModelCall) -> None:
        raise StoppedError(call)

    # A copy: a loss may take entries out of its batch, for which it is called once more.
    batch = tree_map(lambda leaf: leaf, batch)
    try:
        function(_ModelProxy(model, stop), batch)
    except StoppedError as stopped:
        return stopped.args[0]
    raise UserError(
        "--layout pipeline: the loss, or metrics, does not call the model; it must call it once "
        "for a batch"
    )


def run_with_output(
    function: Callable[[Any, Any], Any], model: nn.Module, batch: Any, output: Any
) -> Any:
    """Return a user's function's result for the model's output."""
    return function(_ModelProxy(model, lambda _: output), batch)


def chain_of(task: Task) -> list[nn.Module]:
    """Return the layers of a task's model, in order.

    Raises:
        UserError: they are not known, or do not have all of the model's parameters.
    """
    layers = list(task.layers or ())
    if not layers and type(task.model) is nn.Sequential:
        layers = _flat(task.model)
    layers = layers or _pieces_of(task.model)
    if not layers:
        raise UserError(
            "--layout pipeline requires Task(layers=[...]): the model's modules in order, each "
            "called with the output of the one before; or a model that is an nn.Sequential, or one "
            "of Hugging Face's with a base_model_pp_plan"
        )
    covered = {id(p) for layer in layers for p in layer.parameters()}
    missing = [name for name, p in task.model.named_parameters() if id(p) not in covered]
    if missing:
        raise UserError(
            f"Task: layers lack {', '.join(missing[:3])}{' and others' * (len(missing) > 3)}; they "
            "must have all of the model's parameters"
        )
    return layers


def all_need_call(layers: Sequence[nn.Module]) -> bool:
    """Return whether all of these layers, not only the first, need the loss's call."""
    return isinstance(layers[0], Piece)


def _flat(model: nn.Module) -> list[nn.Module]:
    """Return the layers of an `nn.Sequential`, within others as well; one may occur twice."""
    has_hooks = model._forward_hooks or model._forward_pre_hooks
    has_hooks = has_hooks or model._backward_hooks or model._backward_pre_hooks
    is_chain = type(model) is nn.Sequential and not has_hooks
    # Unlike `children()`, with the repeated ones.
    layers = [*model._modules.values()] if is_chain else []
    return [inner for layer in layers if layer is not None for inner in _flat(layer)] or [model]


class Piece(nn.Module):
    """Consecutive modules of a Hugging Face model, computed within its own forward.

    Every stage calls the model itself, in which substitutes take the places of the modules that
    other ranks have. So the model's own code computes masks, positions and the loss, from the
    samples, and only hidden states travel.
    """

    def __init__(
        self, model: nn.Module, places: Sequence[Sequence[_Place]], number: int, others: Any
    ) -> None:
        """Take the modules at `places[number]`, and `others`, which all pieces use."""
        super().__init__()
        modules: Any = [parent._modules[name] for parent, name in places[number]]
        self.parts = nn.ModuleList([*modules, *others])
        self.number = number
        self.places = places
        self.__dict__["model"] = model  # not a part

    def run(self, end: int, args: Sequence[Any], kwargs: Mapping[str, Any], carried: Any) -> Any:
        """Compute the pieces from this one to before `end`, given the previous one's output."""
        begin = self.number
        places = self.places
        model = self.__dict__["model"]
        if getattr(model.config, "use_cache", False):  # of keys and values, for generation
            kwargs = {"use_cache": False, **kwargs}
        roles = {place: "before" for piece in places[:begin] for place in piece}
        roles |= {places[begin][0]: "first"} if begin else {}
        roles |= {places[end][0]: "after"} if end < len(places) else {}
        replaced: dict[_Place, Any] = {(at, name): at._modules[name] for at, name in roles}
        try:
            for (parent, name), module in replaced.items():
                parent._modules[name] = _ModuleProxy(module, roles[parent, name], carried)
            return model(*args, **kwargs)
        except StoppedError as stopped:
            return stopped.args[0]
        finally:
            for (parent, name), module in replaced.items():
                parent._modules[name] = module


class _ModuleProxy(nn.Module):
    """Replaces a module: has its attributes, but another forward."""

    def __init__(self, module: nn.Module, role: str, carried: Any) -> None:
        super().__init__()
        self.__dict__.update(_module=module, _role=role, _carried=carried)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._role == "before":
            return self._carried
        if self._role == "after":
            raise StoppedError(args[0] if args else kwargs["hidden_states"])
        if args:
            return self._module(self._carried, *args[1:], **kwargs)
        return self._module(**kwargs | {"hidden_states": self._carried})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _pieces_of(model: nn.Module) -> list[nn.Module]:
    """Return the pieces of a model with a `base_model_pp_plan`, in order; none without."""
    # An adapter has the model within.
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    base: Any = getattr(inner, "base_model", None)
    plan = getattr(getattr(base, "config", None), "base_model_pp_plan", None) or ()
    names = [name for name in plan if name in base._modules]
    lists = [name for name in names[1:] if isinstance(base._modules[name], nn.ModuleList)]
    if len(lists) != 1:
        return []
    layers: Any = base._modules[lists[0]]
    cut = names.index(lists[0])
    ends = [(base, name) for name in names]
    children = () if inner is base else inner.named_children()
    heads = [(inner, name) for name, child in children if child is not base]
    places = [ends[:cut], *([(layers, name)] for name in layers._modules), ends[cut + 1 :] + heads]
    places = places if places[-1] else places[:-1]
    others = [child for name, child in base.named_children() if name not in names]
    return [Piece(model, places, number, others) for number in range(len(places))]


def run(layers: Sequence[nn.Module], call: ModelCall | None, carried: Any) -> Any:
    """Return the output of consecutive layers, given the previous layer's, or a call."""
    first, *others = layers
    if isinstance(first, Piece):
        assert call is not None
        return first.run(first.number + len(layers), *call, carried)
    output = first(carried) if call is None else first(*call.args, **call.kwargs)
    for layer in others:
        output = layer(output)
    return output


class Spec(NamedTuple):
    """The form of a stage's output, without the tensors' values."""

    form: Any
    """As JSON holds it; each tensor is a number in the list."""
    tensors: list[tuple[str, list[int], bool]]
    """The dtype and shape of each tensor, and whether it requires a gradient."""


def flatten(value: Any) -> tuple[Spec, list[torch.Tensor]]:
    """Return the form of tensors, in lists, tuples and dicts, and these.

    Raises:
        UserError: there is something else.
    """
    tensors: list[torch.Tensor] = []

    def form_of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        if type(value) in (list, tuple):
            return {type(value).__name__: [form_of(item) for item in value]}
        if type(value) is dict and all(type(key) is str for key in value):
            return {"dict": {key: form_of(item) for key, item in value.items()}}
        if type(value) in _PLAIN:
            return {"plain": value}
        raise UserError(
            f"--layout pipeline: a layer returns a {type(value).__name__}; layers may return "
            "tensors, numbers and strings, in lists, tuples and dicts"
        )

    form = form_of(value)
    rows = [(str(t.dtype).partition(".")[2], list(t.shape), t.requires_grad) for t in tensors]
    return Spec(form, rows), tensors


def unflatten(form: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value that was taken apart."""
    ((kind, value),) = form.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: unflatten(item, tensors) for key, item in value.items()}
    if kind in ("list", "tuple"):
        items = [unflatten(item, tensors) for item in value]
        return items if kind == "list" else tuple(items)
    return value


class _Joined(torch.autograd.Function):
    """Gives a tensor without a history the place in autograd's graph that a leaf has."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def make_input(spec: Spec, tensors: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Return a layer's input with these tensors, and the leaves that get their gradients.

    A layer may change its input in place, as in one process, though autograd does not allow that
    for a leaf. The leaves take no memory.
    """
    leaves: list[torch.Tensor] = []
    inputs = list(tensors)
    for index, (_, shape, requires_grad) in enumerate(spec.tensors):
        if requires_grad:
            leaf = inputs[index].new_empty(()).expand(shape).requires_grad_()
            leaves.append(leaf)
            inputs[index] = _Joined.apply(leaf, [inputs[index]])
    return unflatten(spec.form, inputs), leaves


def has_custom_function(outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether a custom function, written in Python, is in the tensors' autograd graph."""
    left = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set[Any](left)
    while left:
        node: Any = left.pop()
        if getattr(node, "_forward_cls", _Joined) is not _Joined:
            return True
        following = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= following
        left += following
    return False
