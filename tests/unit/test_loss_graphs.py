"""What a loss's graph tells of how it depends on its rows."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from kaitian_mpi.integrations.loss_graphs import Outputs, rules_of_graph
from kaitian_mpi.integrations.losses import SUM, UNKNOWN

ROWS, WIDTH = 6, 5
LABELS = torch.arange(ROWS) % WIDTH


def contrastive(model, x):
    """As of SimCLR, with both views of the rows in one forward."""
    features = functional.normalize(model(torch.cat([x, -x])), dim=1)
    likeness = features @ features.T / 0.5 - 9 * torch.eye(2 * ROWS)
    return functional.cross_entropy(likeness, (torch.arange(2 * ROWS) + ROWS) % (2 * ROWS))


def between_two(model, x):
    """As of CLIP."""
    return functional.cross_entropy(model(x) @ model(x * x).T, torch.arange(ROWS))


def by_word(model, x):
    words = model(torch.stack([x, x * x], 1).flatten(0, 1))
    return functional.cross_entropy(words + words.roll(1, 1), LABELS.repeat_interleave(2))


def between_views(model, x):
    one, other = model(torch.cat([x, -x])).chunk(2)
    return -functional.cosine_similarity(one, other).mean()


def of_logits(reduction, times=None):
    def loss(model, x):
        loss = functional.cross_entropy(model(x), LABELS, reduction=reduction)
        return loss if times is None else loss * times

    return loss


def balanced(model, x):
    scores = model(x)
    share = scores.softmax(1).mean(0)
    return functional.cross_entropy(scores, LABELS) + 1e-4 * (share * share).sum()


def of_features_and_scores(model, x):
    """The scores are computed from the features by way of a batch norm."""
    features = model[0](x)
    return features.square().mean() + functional.cross_entropy(model[1:](features), LABELS)


CASES = {
    "mean": (of_logits("mean"), []),
    "sum": (of_logits("sum"), [SUM]),
    "a part of a sum": (of_logits("sum", 1 / ROWS), []),
    "two sums": (
        lambda m, x: (
            of_logits("sum")(m, x)
            + functional.mse_loss(m(x), torch.ones(ROWS, WIDTH), reduction="sum")
        ),
        [SUM],
    ),
    "sum of rows": (lambda m, x: of_logits("none")(m, x).sum(), []),
    "linear": (lambda m, x: m(x).mean(), []),
    "absolute": (lambda m, x: m(x).abs().mean(), []),
    "contrastive": (contrastive, [UNKNOWN]),
    "between two": (between_two, [UNKNOWN]),
    "words": (by_word, []),
    "between views": (between_views, []),
    "balanced": (balanced, []),
    "features, too": (of_features_and_scores, []),
    "weights, too": (lambda m, x: of_logits("mean")(m, x) + m[0].weight.square().sum(), []),
}


@pytest.mark.parametrize("name", CASES)
def test_a_graph_tells_of_sums_and_of_terms_between_rows(name):
    """The model has a batch norm, which depends on all rows and is no matter of the loss."""
    loss_of, expected = CASES[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, WIDTH))
    outputs = Outputs()
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: outputs.add(output))
    loss = loss_of(model, torch.randn(ROWS, 4))
    assert rules_of_graph(loss, outputs, ROWS) == expected
    assert all(parameter.grad is None for parameter in model.parameters())
    loss.backward()  # its graph is as it was
    assert model[0].weight.grad is not None


def test_a_graph_without_a_second_derivative_tells_nothing():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, gradient):
            return 2 * gradient * ctx.saved_tensors[0]

    layer, outputs = nn.Linear(4, 3), Outputs()
    output = layer(torch.randn(ROWS, 4))
    outputs.add(output)
    features = Square.apply(output)
    assert rules_of_graph((features @ features.T).square().mean(), outputs, ROWS) == []
