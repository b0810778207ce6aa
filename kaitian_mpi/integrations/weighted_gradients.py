"""Multiplies the gradients that flow into a model, and not those that leave it for another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.utils import _pytree

from kaitian_mpi.errors import UserError

_MAX_COPIED = 1 << 16


class Weight(Protocol):
    """The factor of the gradient of a model's output."""

    @property
    def factor(self) -> float:
        """Return the factor on this rank, in a backward. Collective where ranks count labels."""

    def backward_begun(self) -> None:
        """Called in each backward before this factor is used."""

    def backward_done(self) -> None:
        """Called when all gradients are computed, before DDP waits for other ranks."""


def require_gradient(values: Any) -> bool:
    """Return whether any tensor in these values, as a pytree, requires a gradient."""
    return any(
        isinstance(value, torch.Tensor) and value.requires_grad
        for value in _pytree.tree_leaves(values)
    )


def weight_output(output: Any, loss: torch.Tensor | None, of_loss: Weight, others: Weight) -> Any:
    """Return a model's output, with weighted gradients.

    The gradient of `loss`, if that is in the output, is multiplied by `of_loss`.
    """

    def weight_tensor(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        return _WeightGradient.apply(value, of_loss if value is loss else others)

    return _pytree.tree_map(weight_tensor, output)


def unweight_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a forward's arguments, with unweighted gradients for other models.

    A gradient that leaves for another model is weighted again there, by that model's output. So it
    is divided by that weight here: it has been weighted already.
    """

    def unweight_tensor(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.grad_fn is None:
            return value
        weights = _weights_before(value)
        return _UnweightGradient.apply(value, weights) if weights else value

    return _pytree.tree_map(unweight_tensor, (args, dict(kwargs)))


def depends_on_hidden_output(output: Any) -> bool:
    """Return whether a model's output was computed from another's that pytree did not see.

    Looks at the whole graph of the output, before that is weighted.
    """
    tensors = [value for value in _pytree.tree_leaves(output) if isinstance(value, torch.Tensor)]
    return any(map(_weights_before, tensors))


def _weights_before(tensor: torch.Tensor) -> list[Weight]:
    """Return the weights of the model outputs that a tensor was computed from."""
    nodes: list[Any] = [tensor.grad_fn]
    seen: set[Any] = {None}
    weights = []
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        function = getattr(node, "_forward_cls", None)
        if function is _WeightGradient:
            weights.append(node.weight)
        elif function is not _UnweightGradient:
            nodes += [before for before, _ in node.next_functions]
    return weights


class _WeightGradient(torch.autograd.Function):
    """The identity, with a weighted gradient.

    A hook on the model's own tensor would not do: one output may be computed from another, so the
    gradient of a row could pass two hooks.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: Weight) -> torch.Tensor:
        ctx.weight = weight
        # A script may change a loss in place, as the Trainer does; torch refuses that for a view.
        return value.clone() if value.numel() <= _MAX_COPIED else value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.weight.backward_begun()
        torch.autograd.Variable._execution_engine.queue_callback(ctx.weight.backward_done)
        if torch.is_grad_enabled():
            raise UserError(
                "--adaptive does not support gradients of gradients (create_graph=True), as a "
                "rank's are weighted by its rows; leave out --adaptive"
            )
        factor = ctx.weight.factor
        if factor == 0:  # not multiplied by it, which would keep a NaN
            return torch.zeros_like(gradient), None
        return gradient if factor == 1 else gradient * factor, None


class _UnweightGradient(torch.autograd.Function):
    """The identity, with a gradient that is divided by the weight it will be multiplied by."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weights: list[Weight]) -> torch.Tensor:
        ctx.weights = weights
        return value.clone()  # a model may change its input in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        factors = {weight.factor for weight in ctx.weights}
        if len(factors) > 1:
            raise UserError(
                "--adaptive cannot weight the ranks' gradients: the input of a model is computed "
                "from outputs of others that are weighted differently; leave out --adaptive"
            )
        factor = factors.pop()
        # A rank without rows has no gradient: it is multiplied by 0 in the other model.
        return gradient / factor if factor else torch.zeros_like(gradient), None
