"""Finds from a loss's graph how it depends on its rows, without computing it again.

For what has effects, so that it cannot be computed twice, as Lightning's `training_step`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree

from kaitian_mpi.integrations.losses import MAX_DEVIATION, SUM, UNKNOWN, Rule

_SUM_REDUCTION = 2  # of torch's losses
_SAME = "AliasBackward0", "CloneBackward0", "ToCopyBackward0", "ViewBackward0", "_DDPSinkBackward"

Edge = tuple[Any, int]
"""A node of autograd's graph, and the number of one of its outputs."""


class Outputs:
    """The outputs of the modules inside a forward, without their memory."""

    def __init__(self) -> None:
        self._lengths: dict[Edge, int] = {}

    def add(self, output: Any) -> None:
        """Add the tensors with rows and a gradient in what a module has returned."""
        for value in _pytree.tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None and value.dim():
                node, number = get_gradient_edge(value)[:2]
                self._lengths[node, number] = value.size(0)

    def last_before(self, loss: torch.Tensor) -> dict[Edge, int]:
        """Return the length of each that the loss is computed from, and no other of these is.

        What another is computed from may have gone through a batch norm, which is between rows.
        """
        last = self._first_after(loss.grad_fn)
        earlier = set[Edge]()
        for node, _ in last:
            earlier |= set(self._first_after(node, last))
        return {edge: length for edge, length in last.items() if edge not in earlier}

    def _first_after(self, node: Any, among: Mapping[Edge, int] | None = None) -> dict[Edge, int]:
        """Return the outputs that a node's gradients reach first, perhaps only `among` some."""
        outputs = self._lengths if among is None else among
        lengths: dict[Edge, int] = {}
        left = [*_edges_after(node)]
        seen = set[Edge]()
        while left:
            edge = left.pop()
            if edge in seen:
                continue
            seen.add(edge)
            if edge in outputs:
                lengths[edge] = outputs[edge]
            else:
                left += _edges_after(edge[0])
        return lengths


def rules_of_graph(loss: torch.Tensor, outputs: Outputs, rows: int) -> list[Rule]:
    """Return the rule of a loss, if its graph tells; [] if not.

    It is a sum if it is one of torch's losses with `reduction="sum"`. It has terms between rows if
    its gradient in one half of the rows of what it is computed from depends on the other half.

    Args:
        loss: of this rank's rows; its graph is kept.
        outputs: of the modules in the forward that has computed it.
        rows: of the batch.
    """
    lengths = {e: n for e, n in outputs.last_before(loss).items() if rows > 1 and n % rows == 0}
    try:
        has_terms_between = bool(lengths) and _has_terms_between(loss, lengths, rows)
    except (RuntimeError, NotImplementedError):  # a function without a second derivative
        has_terms_between = False
    if has_terms_between:
        return [UNKNOWN]
    return [SUM] if _is_sum(loss.grad_fn) else []


def _is_sum(node: Any) -> bool:
    """Return whether a loss is one of torch's that adds up its rows, or several added up."""
    name = node.name().rpartition("::")[2]
    if name == "AddBackward0" or name in _SAME:
        before = [edge[0] for edge in _edges_after(node)]
        return bool(before) and all(map(_is_sum, before))
    return getattr(node, "_saved_reduction", None) == _SUM_REDUCTION


def _has_terms_between(loss: torch.Tensor, lengths: Mapping[Edge, int], rows: int) -> bool:
    edges = [GradientEdge(*edge) for edge in lengths]
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss, edges, create_graph=True, materialize_grads=True)
        parts = [
            _first_half(gradient, length, rows)
            for gradient, length in zip(gradients, lengths.values(), strict=True)
        ]
        return all(
            _depends_on_others(edges, gradients, [part[order] for part in parts])
            for order in (0, 1)
        )


def _first_half(gradient: torch.Tensor, length: int, rows: int) -> tuple[torch.Tensor, ...]:
    """Return masks of a tensor's rows in the first half of a batch, for two orders.

    If the batch's rows come in turn, as several views of it one after the other; and if what
    belongs to a row is together, as the words of a text.
    """
    numbers = torch.arange(length, device=gradient.device)
    return numbers % rows < rows // 2, numbers // (length // rows) < rows // 2


def _depends_on_others(
    edges: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor],
    firsts: Sequence[torch.Tensor],
) -> bool:
    """Return whether gradients in the first rows depend on the other rows, and not a little."""
    squares = [g[first].square().sum() for g, first in zip(gradients, firsts, strict=True)]
    total = torch.stack(squares).sum()
    if total.grad_fn is None:  # it is linear
        return False
    options: Any = {"retain_graph": True, "materialize_grads": True}
    second = torch.autograd.grad(total, edges, **options)
    inside = sum(float(s[first].square().sum()) for s, first in zip(second, firsts, strict=True))
    other = sum(float(s[~first].square().sum()) for s, first in zip(second, firsts, strict=True))
    return other > MAX_DEVIATION**2 * inside


def _edges_after(node: Any) -> Iterator[Edge]:
    """Return the edges to which a node's gradient flows."""
    for before, number in () if node is None else node.next_functions:
        if before is not None:
            yield before, number
