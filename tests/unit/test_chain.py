"""The layers that a task names for a pipeline."""

import pytest
import torch
from torch import nn

from kaitian_mpi import Task
from kaitian_mpi.errors import UserError
from kaitian_mpi.train.pipeline.measure import _check_chain


def loss_of(model, batch):
    return model(batch).square().mean()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2), (0, 1)])
def test_layers_must_return_what_the_model_does(order):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    task = Task(model=model, optimizer=torch.optim.SGD, data=[0], loss=loss_of)
    chain = [model[place] for place in order]
    if order == (0, 1, 2):
        _check_chain(task, chain, torch.ones(2, 4))
    else:
        with pytest.raises(UserError, match="something else than the model"):
            _check_chain(task, chain, torch.ones(2, 4))


def test_layers_that_fail_are_the_users_mistake():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    task = Task(model=model, optimizer=torch.optim.SGD, data=[0], loss=loss_of, layers=[*model])
    with pytest.raises(UserError, match=r"layers fail \(RuntimeError: .*in order"):
        _check_chain(task, [model[0], model[0], model[1]], torch.ones(2, 4))
