"""Finds out how a model's loss depends on its rows, by which the ranks' gradients are weighted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from kaitian_mpi.distributed.data_parallel import first_length
from kaitian_mpi.errors import AgreedError, UnsupportedError

MEAN, SUM = "the mean over rows", "a sum over rows"
TOKENS, SHIFTED_TOKENS = "the mean over labels", "the mean over labels after the first"
UNKNOWN = "neither a mean nor a sum over rows"
_BY_LABELS = (TOKENS, SHIFTED_TOKENS)
MAX_DEVIATION = 0.05  # a term that depends on the whole batch, as for balancing experts, is small
_MAX_COPIED = 1 << 16
_IGNORED = -100  # of torch's cross entropy


def find_rule(model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> str:
    """Return how the loss that a model's forward has returned depends on its rows.

    Without a loss in `output`, the script computes it from the output: `MEAN` is assumed.
    """
    if loss_of(output) is None or is_lightning(model):
        return MEAN
    return compare_parts(model, lambda args, kwargs: loss_of(model(*args, **kwargs)), args, kwargs)


def compare_parts(
    model: nn.Module,
    compute: Callable[[Any, Any], torch.Tensor | None],
    args: Any,
    kwargs: Mapping[str, Any],
) -> str:
    """Return how the loss that `compute(args, kwargs)` returns depends on the rows.

    Computes the same rows at once and in two parts, in eval mode and without gradients: the parts'
    losses add up to a sum, or their mean by rows or by labels is the loss. On a single row there is
    nothing to compare: `MEAN`.
    """
    labels: Any = kwargs.get("labels")
    rows = first_length(args, kwargs) or 0
    if rows < 2:
        return MEAN
    order = torch.arange(rows)
    if _counts_tokens(labels):
        # Parts with unlike numbers of labels tell rows and labels apart.
        order = count_labels(labels, TOKENS, by_row=True).cpu().argsort()
    parts = order[: rows // 2], order[rows // 2 :]
    with evaluating(model, labels):
        found = [compute(*_rows_of(part, args, kwargs, rows)) for part in (order, *parts)]
        whole, *losses = [float(loss) for loss in found if loss is not None] or [0.0]
    if len(losses) < 2:
        return UNKNOWN  # in eval mode it returns none
    sizes = [len(part) for part in parts]
    expected = {SUM: sum(losses), MEAN: _weighted(losses, sizes)}
    for rule in _BY_LABELS if _counts_tokens(labels) else ():
        counts = count_labels(labels, rule, by_row=True).cpu()
        expected[rule] = _weighted(losses, [int(counts[part].sum()) for part in parts])
    off = {rule: abs(value - whole) for rule, value in expected.items()}
    # By rows with as many labels each, both means agree, but for rounding (in half precision, more
    # than the 1e-6 that is allowed here); later batches may not be so.
    close = [rule for rule in off if off[rule] <= 30 * min(off.values()) + 1e-6 * abs(whole)]
    rule = min([rule for rule in close if rule in _BY_LABELS] or close, key=off.__getitem__)
    return rule if off[rule] <= MAX_DEVIATION * abs(whole) else UNKNOWN


def _weighted(losses: list[float], weights: list[int]) -> float:
    total = sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)
    return float(total) / max(sum(weights), 1)


@contextlib.contextmanager
def evaluating(model: nn.Module, labels: Any) -> Iterator[None]:
    """Compute in eval mode and without gradients; leave no trace in the model or the generators."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [labels.device] if isinstance(labels, torch.Tensor) and labels.is_cuda else []
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices):
            yield
    finally:
        model.train()  # some undo here what they have merged for an evaluation
        for module, training in modes:
            module.training = training


def is_lightning(model: nn.Module) -> bool:
    """Return whether DDP calls the model's `training_step`, which has effects, as its forward."""
    return any(each.__name__ == "LightningModule" for each in type(model).__mro__)


def _rows_of(part: torch.Tensor, args: Any, kwargs: Mapping[str, Any], rows: int) -> Any:
    """Return a part of the rows of a forward's arguments."""

    def take(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and value.size(0) == rows:
            return value[part.to(value.device)]
        return value

    return _pytree.tree_map(take, (args, dict(kwargs)))


def loss_of(output: Any) -> torch.Tensor | None:
    """Return the scalar loss in what a model returns: its `loss`, or the first of a tuple."""
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple | list):
        loss = output[0] if output else None
    else:
        loss = getattr(output, "loss", output)
    is_loss = isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point()
    return loss if is_loss else None


def count_labels(labels: torch.Tensor, rule: str, by_row: bool = False) -> torch.Tensor:
    """Return the number of labels that a loss is the mean over, of each row or of all."""
    counted = labels[:, 1:] if rule == SHIFTED_TOKENS else labels
    return counted.ne(_IGNORED).flatten(1).sum(1) if by_row else counted.ne(_IGNORED).sum()


def _counts_tokens(labels: Any) -> bool:
    return isinstance(labels, torch.Tensor) and labels.dim() > 1 and not labels.is_floating_point()


def scale_gradients(
    output: Any, weight: Callable[[], float], backward_done: Callable[[], None]
) -> Any:
    """Return a model's output, through which gradients will flow multiplied by `weight()`.

    `backward_done` is called when every gradient has been computed, before DDP waits for other
    ranks.

    Raises:
        AgreedError: there is no tensor with a gradient in the output, as torch's pytree sees it.
    """
    found = False

    def weigh(value: Any) -> Any:
        nonlocal found
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        found = True
        return _Weigh.apply(value, weight, backward_done)

    weighed = _pytree.tree_map(weigh, output)
    if not found:
        raise AgreedError(
            f"--adaptive finds no tensor with a gradient in what the model returns "
            f"({type(output).__name__}); return tensors, or dicts, tuples or lists of them"
        )
    return weighed


class _Weigh(torch.autograd.Function):
    """The identity, with a weighted gradient.

    A hook on the model's own tensor would not do: one output may be computed from another, so the
    gradient of a row could pass two hooks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        weight: Callable[[], float],
        backward_done: Callable[[], None],
    ) -> torch.Tensor:
        ctx.weight, ctx.backward_done = weight, backward_done
        # A script may change a loss in place, as the Trainer does; torch refuses that for a view.
        return value.clone() if value.numel() <= _MAX_COPIED else value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        torch.autograd.Variable._execution_engine.queue_callback(ctx.backward_done)
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "--adaptive does not support gradients of gradients (create_graph=True): a rank's "
                "are weighted by its rows"
            )
        factor = ctx.weight()
        return gradient if factor == 1 else gradient * factor, None, None
