"""The loss of Lightning's `training_step`, where that is what a model inside has returned."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from kaitian_mpi.integrations.loss_graphs import Outputs
from kaitian_mpi.integrations.losses import loss_of


class InnerCall(NamedTuple):
    """A forward of a model inside the module that DDP calls."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class InnerCalls:
    """Finds the model inside whose loss the outer one returns, as Hugging Face's models have.

    That model can be computed again to compare its loss; the outer one can not, as it logs.
    """

    def __init__(self) -> None:
        self._outer: nn.Module | None = None
        self._handle: Any = None
        # By the identity of the loss, which is kept: else another one might get it.
        self._calls: dict[int, tuple[torch.Tensor, InnerCall]] = {}
        self._returned: InnerCall | None = None
        self.outputs = Outputs()
        """The outputs of inner modules, if they are collected."""
        self._collects = False

    def begin(self, outer: nn.Module, collects: bool = False) -> None:
        """Watch the models that are called in a forward of `outer`; perhaps collect `outputs`."""
        self.end()
        self._outer = outer
        self._collects = collects
        self.outputs = Outputs()
        self._handle = register_module_forward_hook(self._note, with_kwargs=True)

    def end(self) -> InnerCall | None:
        """Stop; return the call whose loss `outer` has returned, if there is one."""
        if self._handle is not None:
            self._handle.remove()
        returned = self._returned
        self._handle = None
        self._returned = None
        self._calls = {}
        return returned

    def _note(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._collects and module is not self._outer:
            self.outputs.add(output)
        if isinstance(output, tuple | dict) or module is self._outer:
            loss = loss_of(output)
            if loss is None:
                return
            if module is self._outer:
                _, self._returned = self._calls.get(id(loss), (loss, None))
            else:
                self._calls[id(loss)] = loss, InnerCall(module, args, kwargs)
