"""Lets `model.forward(...)` call the hooks of a DDP model as `model(...)` does.

torch calls them in `model(...)` alone; scripts such as lerobot's training call `forward` itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi.distributed.collectives.torch_releases import not_compiled

_hooked = weakref.WeakSet[DistributedDataParallel]()
# Models of which a forward begins whose hooks have been called.
_called = weakref.WeakSet[DistributedDataParallel]()


@not_compiled
class _Begin:
    """The last forward pre-hook; without a state of its own, so that a model can be copied."""

    def __call__(self, model: Any, *_: Any) -> None:
        _called.add(model)


@not_compiled
class _End:
    """A forward hook that is called in any case; without a state of its own."""

    def __call__(self, model: Any, *_: Any) -> None:
        _called.discard(model)  # still there if another pre-hook has failed


def hook_by_name(model: DistributedDataParallel) -> None:
    """Have this model's `forward` call its hooks. Its other pre-hooks are registered before."""
    model.register_forward_pre_hook(_Begin(), with_kwargs=True)
    model.register_forward_hook(_End(), always_call=True)
    _hooked.add(model)


def extend_forward() -> Callable[[], None]:
    """Extend DDP's `forward` for the models of `hook_by_name`; return what ends that."""
    forward = DistributedDataParallel.forward

    @functools.wraps(forward)
    def forward_with_hooks(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if model in _hooked and model not in _called:
            return model(*args, **kwargs)
        _called.discard(model)
        return forward(model, *args, **kwargs)

    def restore() -> None:
        DistributedDataParallel.forward = forward  # type: ignore[method-assign]

    DistributedDataParallel.forward = forward_with_hooks  # type: ignore[assignment, method-assign]
    return restore
