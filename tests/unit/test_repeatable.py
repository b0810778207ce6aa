"""Random numbers and dropout in the comparison of device kinds."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from kaitian_mpi.train.measure.repeatable import Repeatable, switch_off_dropout

X = torch.arange(12.0).reshape(3, 4)
DRAWS = {
    "rand": lambda dtype: torch.rand(3, 4, dtype=dtype),
    "randn": lambda dtype: torch.randn((3, 4), dtype=dtype),
    "rand_like": lambda dtype: torch.rand_like(X.to(dtype)),
    "randn_like": lambda dtype: torch.randn_like(X, dtype=dtype),
    "normal": lambda dtype: torch.normal(X.to(dtype), 1.0),
    "normal of a size": lambda dtype: torch.normal(0.0, 1.0, (3, 4), dtype=dtype),
    "bernoulli": lambda dtype: torch.bernoulli(torch.full((50,), 0.5, dtype=dtype)),
    "normal_": lambda dtype: torch.empty(3, 4, dtype=dtype).normal_(1.0, 2.0),
    "uniform_": lambda dtype: torch.empty(3, 4, dtype=dtype).uniform_(1.0, 2.0),
    "bernoulli_": lambda dtype: torch.empty(50, dtype=dtype).bernoulli_(0.3),
    "distribution": lambda dtype: torch.distributions.Normal(X.to(dtype), 1.0).rsample(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_all_dtypes_draw_the_same_numbers(draw):
    drawn = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        torch.manual_seed(1)
        with Repeatable():
            drawn.append(draw(dtype))
        assert drawn[-1].dtype == dtype
    assert len(set(drawn[0].flatten().tolist())) > 1
    assert torch.allclose(drawn[0], drawn[1].double(), rtol=1e-6)
    assert torch.allclose(drawn[0], drawn[2].double(), rtol=1e-2, atol=1e-2)


def test_whole_numbers_are_drawn():
    with Repeatable():
        assert torch.randint(5, (7,)).dtype == torch.int64
        assert torch.randint(2, 5, (7,), dtype=torch.int32).min() >= 2
        assert torch.randint(low=2, high=5, size=(7,)).max() < 5
        assert torch.randint_like(X, 3, 9).dtype == torch.float32
        assert torch.randperm(6).sort().values.tolist() == list(range(6))


def test_no_dropout_is_applied():
    query = torch.randn(1, 2, 3, 4)
    with Repeatable():
        assert torch.equal(functional.dropout(X, 0.5, True), X)
        assert torch.equal(functional.dropout(X, p=0.5, training=True), X)
        assert torch.equal(functional.alpha_dropout(X, 0.5, True), X)
        assert torch.equal(torch.dropout(X, 0.5, True), X)
        attention = functional.scaled_dot_product_attention
        assert torch.equal(attention(query, query, query, dropout_p=0.9), attention(*[query] * 3))
    layers = (
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5),
        nn.LSTM(4, 4, num_layers=2, dropout=0.5),
    )
    for layer in layers:
        switch_off_dropout(layer)
        with Repeatable():
            first, second = (layer(X[None]) for _ in range(2))
        first, second = (one[0] if isinstance(one, tuple) else one for one in (first, second))
        assert torch.equal(first, second)
