"""Finds the rule by which a loss depends on its rows; the ranks' gradients are weighted by it."""

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
# By a fitting rule, the expected loss is off by a rounding error: at most so many times that of the
# rule that fits best, as means over rows and over labels add up the same terms in other orders.
_ROUNDING_FACTOR = 30
# Relative rounding error of a loss in float32, which is that of its dtype or of the sums before it.
_FLOAT32_ROUNDING = 1e-6
# Each name, ignored entry and first entry makes an unusual rule, and one of so many may fit by
# chance: so it must fit to about the rounding in float32, while no usual rule fits nearly as well.
_UNUSUAL_FITS = 3e-6
_USUAL_MISFITS = 1e-5


class Rule(NamedTuple):
    """A rule by which a loss depends on its rows."""

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
# A term that depends on the whole batch, as for balancing experts, is smaller than this.
MAX_DEVIATION = 0.05

Labels = Mapping[str, torch.Tensor]
"""A forward's tensors that may be labels, as `labels_in` returns them."""


def find_rules(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> list[Rule]:
    """Return the rules by which the loss of a model's forward may depend on its rows."""
    return compare_parts(model, lambda args, kwargs: loss_of(model(*args, **kwargs)), args, kwargs)


def compare_parts(
    model: nn.Module,
    compute: Callable[[Any, Any], torch.Tensor | None],
    args: Any,
    kwargs: Mapping[str, Any],
) -> list[Rule]:
    """Return the rules by which the loss of `compute(args, kwargs)` may depend on the rows.

    Computes the same rows at once and in two parts, in eval mode and without gradients: the parts'
    losses add up to a sum, or their mean by rows or by labels is the loss. If all rows have equally
    many labels, both means are equal, so a second comparison ignores some labels. A third one
    changes each row's first label, to see if it counts. A single row is used twice.

    The likeliest rule comes first. Returns [] if the rows decide nothing: their loss is not finite,
    or the model does not accept a single row twice. Every rank computes equally often, as the loss
    may be collective.
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
    # If the parts have different numbers of labels, a mean over rows is not one over labels.
    order = sum(counts.values(), torch.zeros(rows)).argsort(stable=True)
    parts = order[: rows // 2], order[rows // 2 :]
    forwards = [(part, (args, kwargs)) for part in (order, *parts)]
    unlike = _with_unlike_rows(args, kwargs, counts, parts)
    forwards += [(part, unlike) for part in (order, parts[0])]
    if TOKENS in counts:
        changed = {**kwargs, "labels": _with_other_first(kwargs["labels"])}
        forwards.append((order, (args, changed)))
    with evaluating(model):
        outputs = [compute(*_rows_of(part, *inputs, rows)) for part, inputs in forwards]
    losses = [loss for loss in outputs if loss is not None]
    if len(losses) < len(forwards):
        return [UNKNOWN]  # in eval mode it returns none
    rounding = torch.finfo(losses[0].dtype).eps
    whole, first, second, unlike_whole, unlike_first, *other_first = map(float, losses)
    rules = _fitting_parts((whole, first, second), counts, parts, rounding)
    if len(rules) > 1:
        labels = labels_in(*unlike)
        counts = {rule: _count_by_row(labels[rule.labels], rule) for rule in counts}
        fitting = _fitting_parts((unlike_whole, unlike_first, second), counts, parts, rounding)
        rules = [rule for rule in rules if rule in fitting] or rules
    has_other_first = TOKENS in counts and bool((kwargs["labels"] != changed["labels"]).any())
    if has_other_first and TOKENS in rules and SHIFTED_TOKENS in rules:
        rules.remove(SHIFTED_TOKENS if other_first[0] != whole else TOKENS)
    return rules


def _with_unlike_rows(
    args: Any,
    kwargs: Mapping[str, Any],
    counts: Mapping[Rule, torch.Tensor],
    parts: tuple[torch.Tensor, torch.Tensor],
) -> tuple[Any, Mapping[str, Any]]:
    """Return the arguments with one label in each row of the first part, if the parts are alike.

    If rows have only one label each, then with as many labels as fit. All other entries are
    ignored. Only entries that already occur in the labels are used.
    """
    labels, changed = labels_in(args, kwargs), {}
    for rule, label_counts in counts.items():
        entries = labels[rule.labels]
        first, second = (float(label_counts[part].float().mean()) for part in parts)
        if first == second and id(entries) not in changed and entries.eq(rule.ignored).any():
            by_row = entries[:, rule.first :].flatten(1)
            counted = by_row.ne(rule.ignored)
            kept = counted.cumsum(1) == counted.sum(1, keepdim=True)
            kept[parts[1].to(kept.device)] = True
            unlike = by_row.where(kept, rule.ignored)
            if torch.equal(unlike, by_row):
                label = by_row.where(counted, by_row.min()).amax(1, keepdim=True)
                kept[parts[0].to(kept.device)] = counted[parts[0].to(kept.device)]
                unlike = by_row.where(kept, label)
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
    """Return the labels with each row's first one changed, to the least or greatest of all."""
    least, greatest = labels.min(), labels.max()
    changed = labels.clone()
    changed[:, 0] = torch.where(labels[:, 0] == greatest, least, greatest)
    return changed


def _fitting_parts(
    losses: tuple[float, float, float],
    counts: Mapping[Rule, torch.Tensor],
    parts: tuple[torch.Tensor, torch.Tensor],
    rounding: float,
) -> list[Rule]:
    """Return the rules that relate two parts' losses to that of the whole: `losses[0]`."""
    whole, *part_losses = losses
    row_counts = [len(part) for part in parts]
    expected = {SUM: sum(part_losses), MEAN: _weighted(part_losses, row_counts)}
    for rule, label_counts in counts.items():
        part_counts = [int(label_counts[part].sum()) for part in parts]
        expected[rule] = _weighted(part_losses, part_counts)
    errors = {rule: abs(value - whole) for rule, value in expected.items()}
    return _fitting(errors, abs(whole), rounding)


def _fitting(errors: Mapping[Rule, float], loss: float, rounding: float) -> list[Rule]:
    """Return the rules that fit a loss, by the error of the loss that each rule predicts.

    If all rows have equally many labels, both means fit, up to rounding; as later batches may
    differ, the mean over labels comes first. Without a finite loss no rule fits.
    """
    errors = {rule: error for rule, error in errors.items() if math.isfinite(error)}
    usual = {rule: errors[rule] for rule in USUAL if rule in errors}
    if not usual:
        return []
    tolerance = _ROUNDING_FACTOR * min(usual.values()) + max(rounding, _FLOAT32_ROUNDING) * loss
    fitting = [rule for rule in usual if errors[rule] <= tolerance]
    fitting.sort(key=lambda rule: (not rule.labels, errors[rule]))
    likeliest_error = errors[fitting[0]]
    unusual: list[Rule] = []
    if rounding < _FLOAT32_ROUNDING:  # in half precision, some would fit by chance
        unusual = [
            rule
            for rule, error in errors.items()
            if rule not in usual and error <= _UNUSUAL_FITS * loss
        ]
    if unusual and likeliest_error > _USUAL_MISFITS * loss:
        return unusual
    return [*fitting, *unusual] if likeliest_error <= MAX_DEVIATION * loss else [UNKNOWN]


def agreed_rules(votes: list[list[Rule]], before: Sequence[Rule]) -> list[Rule]:
    """Return the rules that fit the rows of most ranks, from each rank's votes.

    Only rules that have fitted the batches `before`, if any. Without votes these remain.
    """
    counted = Counter(rule for rules in votes for rule in rules)
    if UNKNOWN in counted:
        return [UNKNOWN]
    fitting = {rule: count for rule, count in counted.items() if rule in before} or counted
    max_count = max(fitting.values(), default=0)
    return [rule for rule, count in fitting.items() if count == max_count] or list(before)


def may_tell(rules: Sequence[Rule], labels: Labels) -> bool:
    """Return whether rows may decide between rules, as some of their labels are ignored."""
    flags = [labels[rule.labels].eq(rule.ignored).any() for rule in rules if rule.labels in labels]
    if not flags:
        return False
    # Together, as the host waits for an accelerator.
    return bool(torch.stack([flag.to(flags[0].device) for flag in flags]).any())


def left_open(rules: Sequence[Rule], labels: Labels) -> list[Rule]:
    """Return the rules that count other entries of these rows than the first, likeliest rule.

    A mask may mark the labels that count: both rules count the same entries, so none is open.
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
    """Return the number of entries of each row that count, by every rule a loss may have.

    Labels may have any name, and be a mask. If all rows have equally many of them, only those named
    `labels`, with torch's ignored index, are assumed.
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
    return any(kind.__name__ == "LightningModule" for kind in type(model).__mro__)


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
    """Return a mask of the labels that count."""
    return labels[:, rule.first :].ne(rule.ignored)
