"""Random numbers that are the same on every kind of device, and no dropout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

_CREATORS = (torch.rand, torch.randn, torch.randint, torch.randperm)
_LIKE: dict[Any, Any] = {
    torch.rand_like: torch.rand,
    torch.randn_like: torch.randn,
    torch.randint_like: torch.randint,
}
_OF_TENSORS = (torch.normal, torch.bernoulli)
_IN_PLACE = ("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_")
_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_DROPOUT_OF_ATTENTION = 4  # its place among the arguments


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
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            args, options = _without_dropout(args, options, 1, "p")
        elif func is _ATTENTION:
            args, options = _without_dropout(args, options, _DROPOUT_OF_ATTENTION, "dropout_p")
        elif func in _CREATORS:
            return _create(func, args, options, options.get("dtype"), options.get("device"))
        elif func in _LIKE:
            like, rest = args[0], args[1:]
            dtype = options.get("dtype") or like.dtype
            sized = (*rest, tuple(like.shape))
            return _create(_LIKE[func], sized, options, dtype, options.get("device") or like.device)
        elif func in _OF_TENSORS and "out" not in options:
            return _from_tensors(func, args, options)
        elif name in _IN_PLACE and isinstance(args[0], torch.Tensor):
            return _fill(name, args, options)
        return func(*args, **options)


def without_dropout(model: nn.Module) -> None:
    """Switch off the dropout that modules apply inside a kernel of their own."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0


def _without_dropout(
    args: tuple[Any, ...], options: dict[str, Any], place: int, name: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(args) > place:
        return (*args[:place], 0.0, *args[place + 1 :]), options
    return args, {**options, name: 0.0}


def _create(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    dtype: torch.dtype | None,
    device: Any,
) -> torch.Tensor:
    """Create a tensor of random numbers on the host, then give it its dtype and device."""
    is_whole = func in (torch.randint, torch.randperm)
    wanted = dtype or (torch.int64 if is_whole else torch.get_default_dtype())
    kept = {name: value for name, value in options.items() if name in ("low", "high", "size", "n")}
    drawn = func(*args, **kept, dtype=torch.int64 if is_whole else torch.float32, device="cpu")
    place = device if device is not None else torch.get_default_device()
    made: torch.Tensor = drawn.to(device=place, dtype=wanted)
    return made.requires_grad_() if options.get("requires_grad") else made


def _from_tensors(
    func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> torch.Tensor:
    given = [each for each in (*args, *options.values()) if isinstance(each, torch.Tensor)]
    options.pop("generator", None)
    if not given:
        dtype = options.pop("dtype", None) or torch.get_default_dtype()
        device = options.pop("device", None)
        drawn: torch.Tensor = func(*args, **options, dtype=torch.float32, device="cpu")
        return drawn.to(device=device or torch.get_default_device(), dtype=dtype)

    def on_host(value: Any) -> Any:
        return value.detach().float().cpu() if isinstance(value, torch.Tensor) else value

    own = {name: on_host(value) for name, value in options.items()}
    drawn = func(*map(on_host, args), **own)
    return drawn.to(device=given[0].device, dtype=given[0].dtype)


def _fill(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    target, rest = args[0], args[1:]
    options.pop("generator", None)
    rest = tuple(r.detach().float().cpu() if isinstance(r, torch.Tensor) else r for r in rest)
    dtype = torch.float32 if target.is_floating_point() else target.dtype
    drawn = getattr(torch.empty(target.shape, dtype=dtype), name)(*rest, **options)
    with torch.no_grad():
        filled: torch.Tensor = target.copy_(drawn)
    return filled
