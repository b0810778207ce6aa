"""Random numbers that are the same on every kind of device, and no dropout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

_CREATORS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli"}
_LIKE = {"rand_like", "randn_like", "randint_like"}
_IN_PLACE = {"normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_"}
# Where dropout's probability is among the arguments, and its name.
_ATTENTION = "scaled_dot_product_attention"
_PLACES = {_ATTENTION: (4, "dropout_p")}


class Repeatable(TorchFunctionMode):
    """Draws all random numbers on the host, as float32, and applies no dropout.

    Devices of different kinds, and dtypes on one kind, draw different numbers from the same seed.
    So the same computation with the same seed gives the same results everywhere. A library that
    draws by other means than torch's functions is not covered.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch's, or what replaces it."""
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if "dropout" in name or name == _ATTENTION:
            place, option = _PLACES.get(name, (1, "p"))
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                options[option] = 0.0
        elif (name in _CREATORS or name in _LIKE) and "out" not in options:
            return _draw(func, name, args, options)
        elif name in _IN_PLACE and isinstance(args[0], torch.Tensor):
            return _fill(name, args, options)
        return func(*args, **options)


def switch_off_dropout(model: nn.Module) -> None:
    """Switch off the dropout that modules apply inside a kernel of their own."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0


def _on_host(value: Any) -> Any:
    return value.detach().float().cpu() if isinstance(value, torch.Tensor) else value


def _draw(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], options: dict[str, Any]
) -> torch.Tensor:
    """Draw on the host, then give the result its dtype and device."""
    values = (*args, *options.values())
    like = next((each for each in values if isinstance(each, torch.Tensor)), None)
    is_whole = name in ("randint", "randperm")
    default = torch.int64 if is_whole else torch.get_default_dtype()
    dtype = options.pop("dtype", None) or (default if like is None else like.dtype)
    device = options.pop("device", None)
    if device is None:
        device = torch.get_default_device() if like is None else like.device
    requires_grad = options.pop("requires_grad", False)
    for unused in ("generator", "pin_memory", "layout", "memory_format"):
        options.pop(unused, None)
    if like is None and name != "bernoulli":
        options |= {"dtype": torch.int64 if is_whole else torch.float32, "device": "cpu"}
    own = {key: _on_host(value) for key, value in options.items()}
    drawn: torch.Tensor = func(*map(_on_host, args), **own).to(device=device, dtype=dtype)
    return drawn.requires_grad_() if requires_grad else drawn


def _fill(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    target, rest = args[0], map(_on_host, args[1:])
    options.pop("generator", None)
    dtype = torch.float32 if target.is_floating_point() else target.dtype
    drawn = getattr(torch.empty(target.shape, dtype=dtype), name)(*rest, **options)
    with torch.no_grad():
        filled: torch.Tensor = target.copy_(drawn)
    return filled
