"""Finds the rule by which a loss depends on its batch's rows; it decides the weights of gradients.

A rule says what the loss is the mean, or the sum, over: for example the rows, or the labels that
are not ignored. A row is an entry of the arguments' first dimension.
"""

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

_IGNORED = -100  # the default `ignore_index` of torch's cross entropy
# A rule fits if its error is at most so many times that of the rule that fits best. Both are
# rounding errors, as means over rows and over labels add up the same terms in another order.
_ROUNDING_FACTOR = 30
# The relative rounding error of a loss that is computed in float32, whatever its dtype.
_FLOAT32_ROUNDING = 1e-6
# There are many unusual rules, for each name, ignored entry and first entry, so one may fit by
# chance. It is believed only if its relative error is below the first number, and that of the best
# usual rule is above the second.
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


MEAN = Rule("the mean over rows")
SUM = Rule("a sum over rows")
TOKENS = Rule("the mean over labels", "labels")
SHIFTED_TOKENS = Rule("the mean over labels after the first", "labels", first=1)
USUAL = (TOKENS, SHIFTED_TOKENS, MEAN, SUM)
UNKNOWN = Rule("neither a mean nor a sum over rows")
# A rule fits up to a term of this relative size that depends on the whole batch, as the balancing
# loss of experts does.
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

    Computes the loss of all rows, and of two parts of them, in eval mode and without gradients: a
    rule fits if the parts' losses give that of all rows. If all rows have equally many labels, the
    means over rows and over labels are equal, so a second comparison ignores some labels. A third
    one changes each row's first label, to see if it counts. A single row is used twice.

    The likeliest rule comes first. Returns [] if the rows decide nothing: their loss is not finite,
    or the model does not accept a single row twice. Collective if the loss is: every rank with rows
    computes equally often.
    """
    rows = first_length(args, kwargs) or 0
    if rows != 1:
        return _compare(model, compute, args, kwargs, rows) if rows else []
    args, kwargs = _twice(args, kwargs)
    try:
        return _compare(model, compute, args, kwargs, 2)
    except (RuntimeError, ValueError, IndexError):  # other arguments do not match two rows
        return []


def _compare(
    model: nn.Module,
    compute: Callable[[Any, Any], torch.Tensor | None],
    args: Any,
    kwargs: Mapping[str, Any],
    rows: int,
) -> list[Rule]:
    counts = _counts_of_rules(args, kwargs, rows)
    # Sorted by their labels, so that the parts have different numbers of labels per row if
    # possible: then a mean over rows differs from a mean over labels.
    order = sum(counts.values(), torch.zeros(rows)).argsort(stable=True)
    parts = order[: rows // 2], order[rows // 2 :]
    forwards = [(part, (args, kwargs)) for part in (order, *parts)]
    ignoring = _ignoring_labels(args, kwargs, counts, parts)
    forwards += [(part, ignoring) for part in (order, parts[0])]
    if TOKENS in counts:
        changed_kwargs = {**kwargs, "labels": _with_other_first(kwargs["labels"])}
        forwards.append((order, (args, changed_kwargs)))
    with evaluating(model):
        outputs = [compute(*_rows_of(part, *inputs, rows)) for part, inputs in forwards]
    losses = [loss for loss in outputs if loss is not None]
    if len(losses) < len(forwards):
        return [UNKNOWN]  # the model returns no loss in eval mode
    rounding = torch.finfo(losses[0].dtype).eps
    whole, first, second, ignoring_whole, ignoring_first, *with_other_first = map(float, losses)
    rules = _fitting_parts((whole, first, second), counts, parts, rounding)
    if len(rules) > 1:
        labels = labels_in(*ignoring)
        counts = {rule: _count_by_row(labels[rule.labels], rule) for rule in counts}
        fitting = _fitting_parts((ignoring_whole, ignoring_first, second), counts, parts, rounding)
        rules = [rule for rule in rules if rule in fitting] or rules
    if TOKENS in rules and SHIFTED_TOKENS in rules:
        is_changed = bool((kwargs["labels"] != changed_kwargs["labels"]).any())
        if is_changed:
            first_counts = with_other_first[0] != whole
            rules.remove(SHIFTED_TOKENS if first_counts else TOKENS)
    return rules


def _ignoring_labels(
    args: Any,
    kwargs: Mapping[str, Any],
    counts: Mapping[Rule, torch.Tensor],
    parts: tuple[torch.Tensor, torch.Tensor],
) -> tuple[Any, Mapping[str, Any]]:
    """Return the arguments with other numbers of labels per row in the first part of the rows.

    Only for labels of which both parts have equally many per row, and some are ignored. The rows of
    the first part get one label each, their last, and ignored entries in the place of the others.
    If they have only one label already, their ignored entries become labels. Only entries that
    already occur in the labels are used.
    """
    labels = labels_in(args, kwargs)
    changed: dict[int, torch.Tensor] = {}
    for rule, label_counts in counts.items():
        entries = labels[rule.labels]
        first_mean, second_mean = (float(label_counts[part].float().mean()) for part in parts)
        has_ignored = bool(entries.eq(rule.ignored).any())
        if first_mean == second_mean and has_ignored and id(entries) not in changed:
            by_row = _change_label_counts(entries[:, rule.first :].flatten(1), rule.ignored, parts)
            by_row = by_row.to(entries.dtype).view_as(entries[:, rule.first :])
            changed[id(entries)] = torch.cat([entries[:, : rule.first], by_row], dim=1)
    return _pytree.tree_map(lambda value: changed.get(id(value), value), (args, dict(kwargs)))  # type: ignore[no-any-return]


def _change_label_counts(
    by_row: torch.Tensor, ignored: int, parts: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return labels, shaped (rows, entries), as `_ignoring_labels` changes them."""
    first_part, second_part = (part.to(by_row.device) for part in parts)
    counted = by_row.ne(ignored)
    # From each row's last label on.
    stays = counted.cumsum(1) == counted.sum(1, keepdim=True)
    stays[second_part] = True
    changed = by_row.where(stays, ignored)
    if not torch.equal(changed, by_row):
        return changed
    row_label = by_row.where(counted, by_row.min()).amax(1, keepdim=True)
    stays[first_part] = counted[first_part]
    return by_row.where(stays, row_label)


def _twice(args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the arguments with a single row twice; the second has its numbers halved."""

    def half_of_second(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        is_by_row = value.dim() and value.size(0) == 2
        return torch.cat([value[:1], value[1:] / 2]) if is_by_row else value

    both = _rows_of(torch.tensor([0, 0]), args, kwargs, 1)
    return _pytree.tree_map(half_of_second, both)  # type: ignore[no-any-return]


def _with_other_first(labels: torch.Tensor) -> torch.Tensor:
    """Return the labels with each row's first one changed, to the least or greatest of all."""
    least = labels.min()
    greatest = labels.max()
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
    expected = {SUM: sum(part_losses), MEAN: _weighted_mean(part_losses, row_counts)}
    for rule, label_counts in counts.items():
        part_counts = [int(label_counts[part].sum()) for part in parts]
        expected[rule] = _weighted_mean(part_losses, part_counts)
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
    """Return the rules that most ranks have voted for, each by its rows.

    Only those that also fitted the batches `before`, if any did. Without votes, returns `before`.
    """
    counted = Counter(rule for rules in votes for rule in rules)
    if UNKNOWN in counted:
        return [UNKNOWN]
    fitting = {rule: count for rule, count in counted.items() if rule in before} or counted
    max_count = max(fitting.values(), default=0)
    return [rule for rule, count in fitting.items() if count == max_count] or list(before)


def can_decide(rules: Sequence[Rule], labels: Labels) -> bool:
    """Return whether rows may decide between rules, as some of their labels are ignored."""
    flags = [labels[rule.labels].eq(rule.ignored).any() for rule in rules if rule.labels in labels]
    if not flags:
        return False
    # Stacked, so that the host waits for an accelerator only once.
    return bool(torch.stack([flag.to(flags[0].device) for flag in flags]).any())


def left_open(rules: Sequence[Rule], labels: Labels) -> list[Rule]:
    """Return the rules that count other entries of these rows than the first, likeliest rule.

    Two rules may count the same entries, as of labels and of a mask that marks them.
    """
    likeliest = rules[0].labels if rules else ""
    likeliest_mask = None
    if likeliest in labels:
        likeliest_mask = _mask_of_counted(labels[likeliest], rules[0]).cpu()
    still_open = []
    for rule in rules[1:]:
        if rule.labels in labels and labels[rule.labels].eq(rule.ignored).any():
            mask = _mask_of_counted(labels[rule.labels], rule).cpu()
            if likeliest_mask is None or not torch.equal(likeliest_mask, mask):
                still_open.append(rule)
    return still_open


def _counts_of_rules(args: Any, kwargs: Mapping[str, Any], rows: int) -> dict[Rule, torch.Tensor]:
    """Return the number of entries of each row that count, by rule; [rows] in int64 on the host.

    Every integer argument with a row for each of the batch's may be the labels, or a mask of them.
    """
    counts: dict[Rule, torch.Tensor] = {}
    for name, labels in labels_in(args, kwargs).items():
        if labels.size(0) != rows or not labels.numel():
            continue
        for ignored in dict.fromkeys((_IGNORED, -1, 0, int(labels.min()), int(labels.max()))):
            for first in (0, 1):
                after = " after the first" if first else ""
                text = f"the mean over {name}{after} but {ignored}"
                rule = Rule(text, name, ignored, first)
                if name == "labels" and ignored == _IGNORED:
                    rule = SHIFTED_TOKENS if first else TOKENS
                counts[rule] = _count_by_row(labels, rule)
    return counts


def labels_in(args: Any, kwargs: Mapping[str, Any]) -> Labels:
    """Return a forward's tensors that may be labels, by the name or number of their argument."""
    arguments = {f"argument {number}": value for number, value in enumerate(args, 1)} | dict(kwargs)
    leaves, _ = _pytree.tree_flatten_with_path(arguments)
    return {_path_name(path): leaf for path, leaf in leaves if _may_be_labels(leaf)}


def _may_be_labels(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return False
    return not (value.is_floating_point() or value.is_complex())


def _path_name(path: tuple[Any, ...]) -> str:
    """Return a leaf's path in nested arguments as text: its keys and indices, with dots."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def _weighted_mean(losses: list[float], weights: list[int]) -> float:
    total = sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)
    return float(total) / max(sum(weights), 1)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Compute in eval mode and without gradients; restore the modes and the random generators."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters()}
    used = [device for device in devices if not device_of(device).is_host]
    kind = used[0].type if used else "cpu"
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(used, device_type=kind):
            yield
    finally:
        model.train()  # some models undo here what `eval` has merged
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
    return int(_mask_of_counted(entries, rule).sum())


def _count_by_row(labels: torch.Tensor, rule: Rule) -> torch.Tensor:
    return _mask_of_counted(labels, rule).flatten(1).sum(1).cpu()


def _mask_of_counted(labels: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Return a mask of the labels that count, without the entries before the rule's first."""
    return labels[:, rule.first :].ne(rule.ignored)
