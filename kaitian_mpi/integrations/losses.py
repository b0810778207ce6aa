"""Finds out how a loss depends on its rows, by which the ranks' gradients are weighted."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree

from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.data_parallel import first_length
from kaitian_mpi.errors import UserError

_IGNORED = -100  # of torch's cross entropy


class Rule(NamedTuple):
    """How a loss depends on its rows."""

    text: str
    labels: str = ""
    """The argument whose entries count, as `labels_in` names it; empty if the rows do."""
    ignored: int = _IGNORED
    """The entry that does not count."""
    first: int = 0
    """The first entry of a row that counts."""


MEAN, SUM = Rule("the mean over rows"), Rule("a sum over rows")
TOKENS = Rule("the mean over labels", "labels")
SHIFTED_TOKENS = Rule("the mean over labels after the first", "labels", first=1)
USUAL = (TOKENS, SHIFTED_TOKENS, MEAN, SUM)
UNKNOWN = Rule("neither a mean nor a sum over rows")
MAX_DEVIATION = 0.05  # a term that depends on the whole batch, as for balancing experts, is small

Labels = Mapping[str, torch.Tensor]
"""A forward's tensors that may be labels, as `labels_in` returns them."""


def find_rules(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> list[Rule]:
    """Return how the loss that a model's forward returns may depend on its rows."""
    return compare_parts(model, lambda args, kwargs: loss_of(model(*args, **kwargs)), args, kwargs)


def compare_parts(
    model: nn.Module,
    compute: Callable[[Any, Any], torch.Tensor | None],
    args: Any,
    kwargs: Mapping[str, Any],
) -> list[Rule]:
    """Return how the loss that `compute(args, kwargs)` returns may depend on the rows.

    Computes the same rows at once and in two parts, in eval mode and without gradients: the parts'
    losses add up to a sum, or their mean by rows or by labels is the loss. Rows with as many labels
    each do not tell these means apart, so some of their labels are ignored in a second comparison.
    Whether each row's first label counts is seen if it is changed. A single row is taken twice.

    What is assumed if other ranks' rows fit as well comes first. Returns [] where the rows tell
    nothing: their loss is not finite, or the model does not take a single row twice. Every rank
    computes as often, as the loss may be collective.
    """
    rows = first_length(args, kwargs) or 0
    if rows != 1:
        return _compare(model, compute, args, kwargs, rows) if rows else []
    args, kwargs = _twice(args, kwargs)
    try:
        return _compare(model, compute, args, kwargs, 2)
    except (RuntimeError, ValueError, IndexError):  # other inputs do not go with two rows
        return []


def _compare(
    model: nn.Module,
    compute: Callable[[Any, Any], torch.Tensor | None],
    args: Any,
    kwargs: Mapping[str, Any],
    rows: int,
) -> list[Rule]:
    counts = _counts_of_rules(args, kwargs, rows)
    # Parts with unlike numbers of labels tell rows and labels apart.
    order = sum(counts.values(), torch.zeros(rows)).argsort(stable=True)
    parts = order[: rows // 2], order[rows // 2 :]
    given = [(part, (args, kwargs)) for part in (order, *parts)]
    unlike = _with_unlike_rows(args, kwargs, counts, parts)
    given += [(part, unlike) for part in (order, parts[0])]
    if TOKENS in counts:
        changed = {**kwargs, "labels": _with_other_first(kwargs["labels"])}
        given.append((order, (args, changed)))
    with evaluating(model):
        computed = [compute(*_rows_of(part, *inputs, rows)) for part, inputs in given]
    found = [loss for loss in computed if loss is not None]
    if len(found) < len(given):
        return [UNKNOWN]  # in eval mode it returns none
    rounding = torch.finfo(found[0].dtype).eps
    whole, first, second, unlike_whole, unlike_first, *other_first = map(float, found)
    rules = _fitting_parts((whole, first, second), counts, parts, rounding)
    if len(rules) > 1:
        labels = labels_in(*unlike)
        counts = {rule: _count_by_row(labels[rule.labels], rule) for rule in counts}
        fitting = _fitting_parts((unlike_whole, unlike_first, second), counts, parts, rounding)
        rules = [rule for rule in rules if rule in fitting] or rules
    is_told = TOKENS in counts and bool((kwargs["labels"] != changed["labels"]).any())
    if is_told and TOKENS in rules and SHIFTED_TOKENS in rules:  # as many labels in each row
        rules.remove(SHIFTED_TOKENS if other_first[0] != whole else TOKENS)
    return rules


def _with_unlike_rows(
    args: Any,
    kwargs: Mapping[str, Any],
    counts: Mapping[Rule, torch.Tensor],
    parts: tuple[torch.Tensor, torch.Tensor],
) -> tuple[Any, Mapping[str, Any]]:
    """Return the arguments with one label in each row of the first part, if rows are alike by it.

    Or with as many as there is room for, if they have one. The others are ignored. For both, only
    entries that the labels have anyway are taken.
    """
    labels, changed = labels_in(args, kwargs), {}
    for rule, by_row in counts.items():
        entries = labels[rule.labels]
        first, second = (float(by_row[part].float().mean()) for part in parts)
        if first == second and id(entries) not in changed and entries.eq(rule.ignored).any():
            own = entries[:, rule.first :].flatten(1)
            counted = own.ne(rule.ignored)
            kept = counted.cumsum(1) == counted.sum(1, keepdim=True)
            kept[parts[1].to(kept.device)] = True
            unlike = own.where(kept, rule.ignored)
            if torch.equal(unlike, own):
                label = own.where(counted, own.min()).amax(1, keepdim=True)
                kept[parts[0].to(kept.device)] = counted[parts[0].to(kept.device)]
                unlike = own.where(kept, label)
            unlike = unlike.to(entries.dtype).view_as(entries[:, rule.first :])
            changed[id(entries)] = torch.cat([entries[:, : rule.first], unlike], dim=1)
    return _pytree.tree_map(lambda value: changed.get(id(value), value), (args, dict(kwargs)))  # type: ignore[no-any-return]


def _twice(args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the arguments with a single row twice, once with half of its numbers."""

    def half_of_second(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        is_by_row = value.dim() and value.size(0) == 2
        return torch.cat([value[:1], value[1:] / 2]) if is_by_row else value

    both = _rows_of(torch.tensor([0, 0]), args, kwargs, 1)
    return _pytree.tree_map(half_of_second, both)  # type: ignore[no-any-return]


def _with_other_first(labels: torch.Tensor) -> torch.Tensor:
    """Return the labels with each row's first one changed, to one that another row may have."""
    least, most = labels.min(), labels.max()
    changed = labels.clone()
    changed[:, 0] = torch.where(labels[:, 0] == most, least, most)
    return changed


def _fitting_parts(
    losses: tuple[float, float, float],
    counts: Mapping[Rule, torch.Tensor],
    parts: tuple[torch.Tensor, torch.Tensor],
    rounding: float,
) -> list[Rule]:
    """Return the rules by which two parts' losses make up that of the whole: `losses[0]`."""
    whole, *of_parts = losses
    expected = {SUM: sum(of_parts), MEAN: _weighted(of_parts, [len(part) for part in parts])}
    for rule, by_row in counts.items():
        expected[rule] = _weighted(of_parts, [int(by_row[part].sum()) for part in parts])
    off = {rule: abs(value - whole) for rule, value in expected.items()}
    return _fitting(off, abs(whole), rounding)


def _fitting(off: Mapping[Rule, float], loss: float, rounding: float) -> list[Rule]:
    """Return the rules by which a loss is what was expected, from how far it is off by each.

    By rows with as many labels each, both means agree, but for the rounding of the losses; later
    batches may not be so, and labels come first. Without a finite loss none fits.
    """
    off = {rule: value for rule, value in off.items() if math.isfinite(value)}
    usual = {rule: off[rule] for rule in USUAL if rule in off}
    if not usual:
        return []
    near = 30 * min(usual.values()) + max(rounding, 1e-6) * loss
    close = [rule for rule in usual if off[rule] <= near]
    close.sort(key=lambda rule: (not rule.labels, off[rule]))
    # There are so many others that one may be near by chance, and certainly in half precision.
    most = 3e-6 * loss if rounding < 1e-6 else -1.0
    others = [rule for rule in off if rule not in usual and off[rule] <= most]
    if others and off[close[0]] > 1e-5 * loss:
        return others
    return [*close, *others] if off[close[0]] <= MAX_DEVIATION * loss else [UNKNOWN]


def agreed_rules(votes: list[list[Rule]], before: Sequence[Rule]) -> list[Rule]:
    """Return the rules that fit the rows of the most ranks, from those that fit each rank's.

    Of those that have fitted batches `before`, if there are any. Without votes these remain.
    """
    counted = Counter(rule for rules in votes for rule in rules)
    if UNKNOWN in counted:
        return [UNKNOWN]
    fitting = {rule: count for rule, count in counted.items() if rule in before} or counted
    most = max(fitting.values(), default=0)
    return [rule for rule, count in fitting.items() if count == most] or list(before)


def may_tell(rules: Sequence[Rule], labels: Labels) -> bool:
    """Return whether rows may tell which of the rules holds: some of their labels are ignored."""
    found = [labels[rule.labels].eq(rule.ignored).any() for rule in rules if rule.labels in labels]
    # Together, as an accelerator is waited for.
    return bool(torch.stack([flag.to(found[0].device) for flag in found]).any()) if found else False


def left_open(rules: Sequence[Rule], labels: Labels) -> list[Rule]:
    """Return the rules by which other entries of these rows count than by the first, the likeliest.

    A mask may mark the labels that count: by both, the same entries do, and nothing is open.
    """
    likeliest = rules[0].labels if rules else ""
    first = _counts(labels[likeliest], rules[0]).cpu() if likeliest in labels else None
    still_open = []
    for rule in rules[1:]:
        if rule.labels in labels and labels[rule.labels].eq(rule.ignored).any():
            counted = _counts(labels[rule.labels], rule).cpu()
            if first is None or not torch.equal(first, counted):
                still_open.append(rule)
    return still_open


def _counts_of_rules(args: Any, kwargs: Mapping[str, Any], rows: int) -> dict[Rule, torch.Tensor]:
    """Return how many entries of each row count, by every rule of labels that a loss may have.

    Labels may have any name, and be a mask. Only those named `labels`, with torch's ignored index,
    are assumed where the rows have as many each.
    """
    counts: dict[Rule, torch.Tensor] = {}
    for name, labels in labels_in(args, kwargs).items():
        if labels.size(0) != rows or not labels.numel():
            continue
        for ignored in dict.fromkeys((_IGNORED, -1, 0, int(labels.min()), int(labels.max()))):
            for first in (0, 1):
                after = " after the first" * first
                rule = Rule(f"the mean over {name}{after} but {ignored}", name, ignored, first)
                if name == "labels" and ignored == _IGNORED:
                    rule = SHIFTED_TOKENS if first else TOKENS
                counts[rule] = _count_by_row(labels, rule)
    return counts


def labels_in(args: Any, kwargs: Mapping[str, Any]) -> Labels:
    """Return a forward's tensors that may be labels, by the name or number of their argument."""
    arguments = {f"argument {number}": value for number, value in enumerate(args, 1)} | dict(kwargs)
    leaves, _ = _pytree.tree_flatten_with_path(arguments)
    named = {
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): leaf
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1
    }
    return {
        name: leaf
        for name, leaf in named.items()
        if not (leaf.is_floating_point() or leaf.is_complex())
    }


def _weighted(losses: list[float], weights: list[int]) -> float:
    total = sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)
    return float(total) / max(sum(weights), 1)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Compute in eval mode and without gradients; leave no trace in the model or the generators."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters()}
    used = [device for device in devices if not device_of(device).is_host]
    kind = used[0].type if used else "cpu"
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(used, device_type=kind):
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


def count_labels(labels: Labels, rule: Rule) -> int:
    """Return the number of labels that a loss is the mean over.

    Raises:
        UserError: the argument that held them is missing.
    """
    entries = labels.get(rule.labels)
    if entries is None:
        raise UserError(
            f"--adaptive has found that the loss is {rule.text}, and this batch has no "
            f"{rule.labels}; pass the same arguments in each step"
        )
    return int(_counts(entries, rule).sum())


def _count_by_row(labels: torch.Tensor, rule: Rule) -> torch.Tensor:
    return _counts(labels, rule).flatten(1).sum(1).cpu()


def _counts(labels: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Return which labels count."""
    return labels[:, rule.first :].ne(rule.ignored)
