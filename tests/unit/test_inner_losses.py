"""Whether the loss of Lightning's `training_step` is that of a model inside."""

import pytest
import torch
from torch import nn

from kaitian_mpi.integrations.inner_losses import InnerCalls


class Model(nn.Module):
    def forward(self, x):
        return {"loss": x.square().mean()}


class Outer(nn.Module):
    """Returns what its `make` makes of what the model inside returns."""

    def __init__(self, make):
        super().__init__()
        self.model, self.make = Model(), make

    def forward(self, x):
        return self.make(self.model(x))


def another_loss(output):
    """Return another loss, which has the place in memory of the model's if that is free."""
    place = id(output.pop("loss"))
    tried = []
    while len(tried) < 1000 and (not tried or id(tried[-1]) != place):
        tried.append(torch.tensor(1.0))
    return tried[-1]


@pytest.mark.parametrize(
    ("make", "is_inner"),
    [(lambda output: output["loss"], True), (lambda output: 2 * output["loss"], False),
     (another_loss, False)],
)  # fmt: skip
def test_only_the_same_loss_is_that_of_the_model_inside(make, is_inner):
    calls, outer = InnerCalls(), Outer(make)
    calls.begin(outer)
    outer(torch.ones(2))
    found = calls.end()
    assert (found is not None) == is_inner
    assert found is None or found.model is outer.model
