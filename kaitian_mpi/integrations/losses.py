"""Finds out how a model's loss depends on its rows, by which the ranks' gradients are weighted."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree

from kaitian_mpi.distributed.data_parallel import first_length
from kaitian_mpi.errors import AgreedError, UnsupportedError, UserError

_IGNORED = -100  # of torch's cross entropy


class Rule(NamedTuple):
    """How a loss depends on its rows."""

    text: str
    labels: str = ""
    """The argument whose entries count, as `_named` names it; empty if the rows do."""
    ignored: int = _IGNORED
    """The entry that does not count."""
    first: int = 0
    """The first entry of a row that counts."""


MEAN, SUM = Rule("the mean over rows"), Rule("a sum over rows")
TOKENS = Rule("the mean over labels", "labels")
SHIFTED_TOKENS = Rule("the mean over labels after the first", "labels", first=1)
UNKNOWN = Rule("neither a mean nor a sum over rows")
MAX_DEVIATION = 0.05  # a term that depends on the whole batch, as for balancing experts, is small
_MAX_COPIED = 1 << 16


def find_rules(model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> list[Rule]:
    """Return how the loss that a model's forward has returned may depend on its rows.

    Without a loss in `output`, the script computes it from the output: `MEAN` is assumed.
    """
    if loss_of(output) is None or is_lightning(model):
        return [MEAN]
    return compare_parts(model, lambda args, kwargs: loss_of(model(*args, **kwargs)), args, kwargs)


def compare_parts(
    model: nn.Module,
    compute: Callable[[Any, Any], torch.Tensor | None],
    args: Any,
    kwargs: Mapping[str, Any],
) -> list[Rule]:
    """Return how the loss that `compute(args, kwargs)` returns may depend on the rows.

    Computes the same rows at once and in two parts, in eval mode and without gradients: the parts'
    losses add up to a sum, or their mean by rows or by labels is the loss. Whether each row's first
    label counts is seen if it is changed. What is assumed if other
    ranks' rows fit as well comes first. On a single row there is nothing to compare: all fit, [].
    """
    rows = first_length(args, kwargs) or 0
    if rows < 2:
        return []
    counts = _counts_of_rules(args, kwargs, rows)
    # Parts with unlike numbers of labels tell rows and labels apart.
    order = sum(counts.values(), torch.zeros(rows)).argsort(stable=True)
    parts = order[: rows // 2], order[rows // 2 :]
    given = [(order, kwargs), *((part, kwargs) for part in parts)]
    if TOKENS in counts:  # on all ranks, as the loss may be collective
        given.append((order, {**kwargs, "labels": _with_other_first(kwargs["labels"])}))
    with evaluating(model, kwargs.get("labels")):
        found = [compute(*_rows_of(part, args, named, rows)) for part, named in given]
        values = [float(loss) for loss in found if loss is not None]
    if found[0] is None or len(values) < len(given):
        return [UNKNOWN]  # in eval mode it returns none
    whole, *losses = values[:3]
    expected = {SUM: sum(losses), MEAN: _weighted(losses, [len(part) for part in parts])}
    for rule, by_row in counts.items():
        expected[rule] = _weighted(losses, [int(by_row[part].sum()) for part in parts])
    off = {rule: abs(value - whole) for rule, value in expected.items()}
    rules = _fitting(off, abs(whole), torch.finfo(found[0].dtype).eps)
    if TOKENS in rules and SHIFTED_TOKENS in rules:  # the rows have as many labels each
        rules.remove(SHIFTED_TOKENS if values[3] != whole else TOKENS)
    return rules


def _with_other_first(labels: torch.Tensor) -> torch.Tensor:
    """Return the labels with each row's first one changed, to one that another row may have."""
    least, most = labels.min(), labels.max()
    changed = labels.clone()
    changed[:, 0] = torch.where(labels[:, 0] == most, least, most)
    return changed


def _fitting(off: Mapping[Rule, float], loss: float, rounding: float) -> list[Rule]:
    """Return the rules by which a loss is what was expected, from how far it is off by each.

    By rows with as many labels each, both means agree, but for the rounding of the losses; later
    batches may not be so, and labels come first.
    """
    usual = {rule: off[rule] for rule in (TOKENS, SHIFTED_TOKENS, MEAN, SUM) if rule in off}
    near = 30 * min(usual.values()) + max(rounding, 1e-6) * loss
    close = [rule for rule in usual if off[rule] <= near]
    close.sort(key=lambda rule: (not rule.labels, off[rule]))
    # There are so many others that one may be near by chance, and certainly in half precision.
    most = 3e-6 * loss if rounding < 1e-6 else -1.0
    others = [rule for rule in off if rule not in usual and off[rule] <= most]
    if others and off[close[0]] > 1e-5 * loss:
        return others
    return [*close, *others] if off[close[0]] <= MAX_DEVIATION * loss else [UNKNOWN]


def agreed_rule(found: list[list[Rule]]) -> Rule:
    """Return the rule that fits the rows of the most ranks, from those that fit each rank's."""
    votes = Counter(rule for rules in found for rule in rules)
    if UNKNOWN in votes:
        return UNKNOWN
    return max(votes, key=votes.__getitem__, default=MEAN)  # the first of several


def _counts_of_rules(args: Any, kwargs: Mapping[str, Any], rows: int) -> dict[Rule, torch.Tensor]:
    """Return how many entries of each row count, by every rule of labels that a loss may have.

    Labels may have any name, and be a mask. Only those named `labels`, with torch's ignored index,
    are assumed where the rows have as many each.
    """
    counts: dict[Rule, torch.Tensor] = {}
    for name, labels in _named(args, kwargs).items():
        is_whole = not (labels.is_floating_point() or labels.is_complex())
        if not is_whole or labels.dim() < 2 or labels.size(0) != rows or not labels.numel():
            continue
        for ignored in dict.fromkeys((_IGNORED, -1, 0, int(labels.min()), int(labels.max()))):
            for first in (0, 1):
                after = " after the first" * first
                rule = Rule(f"the mean over {name}{after} but {ignored}", name, ignored, first)
                if name == "labels" and ignored == _IGNORED:
                    rule = SHIFTED_TOKENS if first else TOKENS
                counts[rule] = _counts(labels, rule).flatten(1).sum(1).cpu()
    return counts


def _named(args: Any, kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a forward's tensors by the name or number of their argument."""
    arguments = {f"argument {number}": value for number, value in enumerate(args, 1)} | dict(kwargs)
    leaves, _ = _pytree.tree_flatten_with_path(arguments)
    return {
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): leaf
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    }


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


def count_labels(args: Any, kwargs: Mapping[str, Any], rule: Rule) -> int:
    """Return the number of labels that a loss is the mean over, by a forward's arguments.

    Raises:
        UserError: the argument that held them is missing.
    """
    labels = _named(args, kwargs).get(rule.labels)
    if labels is None:
        raise UserError(
            f"--adaptive has found that the loss is {rule.text}, and this batch has no "
            f"{rule.labels}; pass the same arguments in each step"
        )
    return int(_counts(labels, rule).sum())


def _counts(labels: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Return which labels count."""
    return labels[:, rule.first :].ne(rule.ignored)


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
