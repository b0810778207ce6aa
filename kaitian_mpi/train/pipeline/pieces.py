"""A Hugging Face model as a chain, divided by its `base_model_pp_plan`.

Every stage calls the model itself, in which stand-ins take the places of the modules that other
ranks have. So the model's own code computes masks, positions and the loss, from the samples, and
only hidden states travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

_Place = tuple[nn.Module, str]  # a module's parent, and its name there


class Piece(nn.Module):
    """Consecutive modules of a model, computed within its own forward."""

    def __init__(
        self, model: nn.Module, places: Sequence[Sequence[_Place]], number: int, others: Any
    ) -> None:
        """Take the modules at `places[number]`, and `others`, which all pieces use."""
        super().__init__()
        own: Any = [parent._modules[name] for parent, name in places[number]]
        self.parts = nn.ModuleList([*own, *others])
        self.number, self.places = number, places
        self.__dict__["model"] = model  # not a part

    def run(self, end: int, args: Sequence[Any], kwargs: Mapping[str, Any], carried: Any) -> Any:
        """Compute this piece and those up to before number `end`, in a call of the model.

        They begin with `carried`, as the piece before returned it; None if they are the first.
        """
        begin, places, model = self.number, self.places, self.__dict__["model"]
        if getattr(model.config, "use_cache", False):  # of keys and values, for generation
            kwargs = {"use_cache": False, **kwargs}
        roles = {place: "before" for piece in places[:begin] for place in piece}
        roles |= {places[begin][0]: "first"} if begin else {}
        roles |= {places[end][0]: "after"} if end < len(places) else {}
        replaced: dict[_Place, Any] = {(at, name): at._modules[name] for at, name in roles}
        try:
            for (parent, name), module in replaced.items():
                parent._modules[name] = _StandIn(module, roles[parent, name], carried)
            return model(*args, **kwargs)
        except StoppedError as stopped:
            return stopped.args[0]
        finally:
            for (parent, name), module in replaced.items():
                parent._modules[name] = module


class _StandIn(nn.Module):
    """Takes the place of a module, and is like it in all but what it computes."""

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


class StoppedError(BaseException):  # no handler of the user's, or the model's, catches it
    """Ends a call when what it was made for is known."""


def pieces_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's pieces, in order; none if it has no plan, or one of another form."""
    # An adapter has the model within.
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    base: Any = getattr(inner, "base_model", None)
    plan = getattr(getattr(base, "config", None), "base_model_pp_plan", None) or ()
    names = [name for name in plan if name in base._modules]
    lists = [name for name in names[1:] if isinstance(base._modules[name], nn.ModuleList)]
    if len(lists) != 1:
        return []
    layers: Any = base._modules[lists[0]]
    cut, ends = names.index(lists[0]), [(base, name) for name in names]
    children = () if inner is base else inner.named_children()
    heads = [(inner, name) for name, child in children if child is not base]
    places = [ends[:cut], *([(layers, name)] for name in layers._modules), ends[cut + 1 :] + heads]
    places = places if places[-1] else places[:-1]
    others = [child for name, child in base.named_children() if name not in names]
    return [Piece(model, places, number, others) for number in range(len(places))]
