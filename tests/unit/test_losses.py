"""The rules of a loss that remain after all ranks have compared their rows."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations import loss_weights
from kaitian_mpi.integrations.losses import (
    MEAN,
    SHIFTED_TOKENS,
    SUM,
    TOKENS,
    UNKNOWN,
    Rule,
    agreed_rules,
    can_decide,
    compare_parts,
    evaluating,
)


@pytest.mark.parametrize(
    ("votes", "before", "rules"),
    [
        ([[MEAN], [MEAN]], [], [MEAN]),
        ([[TOKENS, MEAN], [MEAN]], [], [MEAN]),
        ([[TOKENS, MEAN], []], [], [TOKENS, MEAN]),
        ([[], []], [TOKENS, MEAN], [TOKENS, MEAN]),
        ([[], []], [], []),
        ([[SUM, MEAN], [SUM, MEAN]], [MEAN, TOKENS], [MEAN]),
        ([[SUM], [SUM]], [MEAN, TOKENS], [SUM]),
        ([[UNKNOWN], [MEAN]], [], [UNKNOWN]),
    ],
)
def test_the_rules_that_fit_the_rows_of_the_most_ranks_remain(votes, before, rules):
    assert agreed_rules(votes, before) == rules


def test_rows_can_decide_only_if_some_of_their_labels_are_ignored():
    labels = {"labels": torch.tensor([[1, 2], [2, 1]])}
    assert not can_decide([TOKENS, MEAN], labels)
    labels["labels"][0, 0] = -100
    assert can_decide([TOKENS, MEAN], labels)
    assert not can_decide([MEAN, SUM], labels)
    assert not can_decide([TOKENS, MEAN], {})


def rules_of(labels, make=lambda scores, labels: cross_entropy(scores.mT, labels)):
    torch.manual_seed(0)
    model = nn.Embedding(5, 5).double()
    tokens = torch.randint(5, labels.shape)

    def compute(args, kwargs):
        return make(model(kwargs["x"]), kwargs["labels"])

    return compare_parts(model, compute, (), {"x": tokens, "labels": labels})


def test_rows_that_decide_nothing_have_no_rule():
    all_ignored = torch.full((2, 3), -100)
    assert rules_of(all_ignored) == []  # the mean of no labels is NaN

    def of_one_row(scores, labels):
        return cross_entropy(scores.view(3, 5), labels[0])

    assert rules_of(torch.tensor([[1, 2, 3]]), of_one_row) == []


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2, -100, 0]],
        [[1, 2, -100, 0], [1, -100, 3, 4]],
        [[-100, -100, 3, -100]],
        [[-100, 2, -100, -100], [-100, -100, -100, 1]],
    ],
)
def test_rows_of_as_many_labels_tell_means_apart_if_some_are_ignored(rows):
    labels = torch.tensor(rows)

    def by_row(scores, labels):
        losses = cross_entropy(scores.mT, labels, reduction="none")
        return (losses.sum(1) / labels.ne(-100).sum(1)).mean()

    def shifted(scores, labels):
        return cross_entropy(scores[:, :-1].mT, labels[:, 1:])

    assert rules_of(labels)[0] == TOKENS
    assert rules_of(labels, shifted)[0] == SHIFTED_TOKENS
    assert rules_of(labels, by_row)[0] == MEAN
    assert not {TOKENS, SHIFTED_TOKENS} & set(rules_of(labels, by_row))


def test_ranks_at_different_points_are_told_so(monkeypatch):
    """A rank that begins a loader would take the other's rules for its rows."""
    of_rank_1 = ("a backward of a new loss", [list(MEAN)])
    monkeypatch.setattr(
        loss_weights, "gather_values", lambda comm, of_rank_0: [of_rank_0, of_rank_1]
    )
    ranks = loss_weights.Ranks(None, None, None)
    with pytest.raises(UserError, match="the first batch on rank 0, a backward of a new loss on"):
        ranks.gather_at("the first batch", 8)


def test_a_rule_is_certain_once_all_others_count_the_same_entries(monkeypatch):
    printed = []
    monkeypatch.setattr(loss_weights, "print_rank_0", lambda world, text: printed.append(text))
    world = SimpleNamespace(comm=SimpleNamespace(size=1))
    ranks = SimpleNamespace(
        world=world, comm=world.comm, sum=int, gather_at=lambda point, value: [value]
    )
    mask_rule = Rule("the mean over mask but 0", "mask", 0)
    rows = SimpleNamespace(this_rank=1, all_ranks=1)
    for rule, mask, word in (
        (MEAN, [[1, 1]], "is"),
        (MEAN, [[1, 0]], "is taken as"),
        (TOKENS, [[1, 0]], "is"),  # both rules count the same entry
        (TOKENS, [[0, 1]], "is taken as"),
    ):
        loss = loss_weights.Loss(ranks, "model")
        labels = {"mask": torch.tensor(mask), "labels": torch.tensor([[3, -100]])}
        loss.observe(labels, lambda rule=rule: [rule, mask_rule])
        assert loss.weight(rows, labels) == 1
        assert printed.pop() == f"adaptive: the loss of the model {word} {rule.text}"


class OnDevice(nn.Dropout):
    """A model on a device that this machine does not have."""

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(device=torch.device("mps", 0))] * 2)


@pytest.mark.parametrize(("model", "states"), [(OnDevice(), ["before"]), (nn.Dropout(), [])])
def test_an_evaluation_uses_up_no_random_numbers_of_the_models_device(monkeypatch, model, states):
    restored = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda device: "before")
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state, device: restored.append(state))
    host = torch.get_rng_state()
    with evaluating(model):
        assert not model.training
        torch.rand(3)
    assert (restored, model.training) == (states, True)
    assert torch.equal(torch.get_rng_state(), host)
