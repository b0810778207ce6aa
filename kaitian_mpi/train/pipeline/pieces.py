"""A Hugging Face model as a chain, divided by its `base_model_pp_plan`.

Every stage calls the model itself, in which stand-ins take the places of the modules that other
ranks have. So the model's own code computes masks, positions and the loss, from the samples, and
only hidden states travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from kaitian_mpi.errors import UserError


class _Place(NamedTuple):
    """Where a model has one of its modules."""

    parent: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        module = self.parent._modules[self.name]
        assert module is not None
        return module


class Piece(nn.Module):
    """Consecutive modules of a model, computed within its own forward."""

    def __init__(
        self, model: nn.Module, places: Sequence[Sequence[_Place]], number: int, others: Any
    ) -> None:
        """Take the modules at `places[number]`, and `others`, which all pieces use."""
        super().__init__()
        self.parts = nn.ModuleList([*(place.module for place in places[number]), *others])
        self.number, self.places = number, places
        self.__dict__["model"] = model  # not a part

    def run(self, end: int, args: Sequence[Any], kwargs: Mapping[str, Any], carried: Any) -> Any:
        """Compute this piece and those up to before number `end`, in a call of the model.

        The first one's first argument is `carried`, what the piece before has returned.
        Returns what the next piece begins with, or what the model returns.
        """
        begin, places, stands = self.number, self.places, dict[_Place, Any]()
        for place in (place for piece in places[:begin] for place in piece):
            stands[place] = lambda *_, **__: carried
        if begin:
            first = places[begin][0]
            stands[first] = _with_first(first.module, carried)
        if end < len(places):
            stands[places[end][0]] = _stop
        model = self.__dict__["model"]
        if getattr(model.config, "use_cache", False):  # of keys and values, for generation
            kwargs = {"use_cache": False, **kwargs}
        with _standing_in(stands):
            try:
                return model(*args, **kwargs)
            except _ReachedError as reached:
                return reached.hidden


def pieces_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's pieces, in order; none if it has no plan.

    Raises:
        UserError: the plan is of another form.
    """
    inner: Any = model
    if hasattr(inner, "get_base_model"):  # has adapters
        inner = inner.get_base_model()
    base: Any = getattr(inner, "base_model", None)
    plan = getattr(getattr(base, "config", None), "base_model_pp_plan", None)
    if not plan:
        return []
    names = [name for name in plan if name in base._modules]
    lists = [name for name in names if isinstance(base._modules[name], nn.ModuleList)]
    if len(lists) != 1 or names[0] == lists[0]:
        raise UserError(
            f"--layout pipeline: the base_model_pp_plan of {type(inner).__name__} names no list of "
            "layers after its embedding; name the model's layers, Task(layers=[...])"
        )
    layers: Any = base._modules[lists[0]]
    cut, ends = names.index(lists[0]), [_Place(base, name) for name in names]
    heads = (
        []
        if inner is base
        else [_Place(inner, n) for n, c in inner.named_children() if c is not base]
    )
    middle = [[_Place(layers, name)] for name in layers._modules]
    places = [ends[:cut], *middle, ends[cut + 1 :] + heads]
    places = places if places[-1] else places[:-1]
    others = [child for name, child in base.named_children() if name not in names]
    return [Piece(model, places, number, others) for number in range(len(places))]


class _StandIn(nn.Module):
    """Computes something else in the place of a module, and is like it in all else."""

    def __init__(self, module: nn.Module, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__.update(_module=module, forward=compute)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


class _ReachedError(BaseException):  # no handler of the model's catches it
    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


def _stop(*args: Any, **kwargs: Any) -> Any:
    raise _ReachedError(args[0] if args else kwargs["hidden_states"])


def _with_first(module: nn.Module, first: Any) -> Callable[..., Any]:
    """Return a function that calls a module with another first argument."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        if args:
            return module(first, *args[1:], **kwargs)
        return module(**kwargs | {"hidden_states": first})

    return compute


@contextmanager
def _standing_in(stands: Mapping[_Place, Callable[..., Any]]) -> Iterator[None]:
    replaced = {place: place.module for place in stands}
    for place, compute in stands.items():
        place.parent._modules[place.name] = _StandIn(place.module, compute)
    try:
        yield
    finally:
        for place, module in replaced.items():
            place.parent._modules[place.name] = module
