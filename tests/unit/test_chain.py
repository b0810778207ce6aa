"""The layers that a task names for a pipeline, or that its model has."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from kaitian_mpi import Task
from kaitian_mpi.errors import UserError
from kaitian_mpi.train.layouts.pipeline.chain import (
    Spec,
    capture_call,
    chain_of,
    flatten,
    make_input,
)
from kaitian_mpi.train.layouts.pipeline.chain_check import check_chain
from kaitian_mpi.train.layouts.pipeline.random_numbers import same_random_numbers

BATCHES = torch.ones(2, 4), torch.arange(8.0).view(2, 4)


def loss_of(model, batch):
    return model(batch).square().mean()


def make_task(model, **parts):
    parts = {"optimizer": torch.optim.SGD, "data": [0], "loss": loss_of, **parts}
    return Task(model=model, **parts)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2), (0, 1)])
def test_layers_must_return_what_the_model_does(order):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    task = make_task(model)
    chain = [model[place] for place in order]
    if order == (0, 1, 2):
        check_chain(task, chain, BATCHES)
    else:
        with pytest.raises(UserError, match="something else than the model"):
            check_chain(task, chain, BATCHES)


def test_layers_that_fail_are_the_users_mistake():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    task = make_task(model, layers=[*model])
    with pytest.raises(UserError, match=r"layers fail \(RuntimeError: .*in order"):
        check_chain(task, [model[0], model[0], model[1]], BATCHES)


def test_a_module_that_is_used_twice_is_there_twice():
    first, shared, last = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)
    inner = nn.Sequential(shared, last)
    model = nn.Sequential(first, shared, inner, inner)
    assert chain_of(make_task(model)) == [first, shared, shared, last, shared, last]


def test_an_inner_sequential_with_a_hook_stays_whole():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    inner.register_forward_hook(lambda module, given, output: output + 1)
    model = nn.Sequential(nn.Linear(4, 4), inner)
    assert chain_of(make_task(model)) == [model[0], inner]


class Stash(nn.Module):
    """Keeps its input where another layer finds it, for a skip connection."""

    kept = None

    def forward(self, x):
        Stash.kept = x
        return x


class Unstash(nn.Module):
    def forward(self, x):
        return x + Stash.kept


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        return self.layers[1](functional.dropout(self.layers[0](x), 0.5, self.training))


class Scales(nn.Module):
    def forward(self, x):
        return x.mul_(2)


def test_what_stages_would_not_compute_as_one_process_is_refused():
    norm, drops = nn.BatchNorm1d(4), Drops()
    popped = {"x": BATCHES[0], "y": BATCHES[0]}
    for model, message, parts in (
        (nn.Sequential(Stash(), nn.Linear(4, 4), Unstash()), "something else", {}),
        (nn.Sequential(norm, nn.Linear(4, 4), norm), "share a BatchNorm1d, whose running", {}),
        (drops, "something else", {"layers": [*drops.layers]}),
        (nn.Sequential(Scales(), nn.Linear(4, 4)), "model changes its batch in place", {}),
        (nn.Linear(4, 4), "loss changes its batch", {"loss": lambda m, b: m(b.add_(1)).sum()}),
        (nn.Linear(4, 4), "", {"loss": lambda m, b: m(b.pop("x")).sum()}),
    ):
        task = make_task(model, **parts)
        batches = [{**popped}] if not message else [batch.clone() for batch in BATCHES]
        chain = list(task.layers or chain_of(make_task(nn.Sequential(model))))
        if message:
            with pytest.raises(UserError, match=message):
                check_chain(task, chain, batches)
        else:
            check_chain(task, chain, batches)
            assert batches == [popped]


def test_a_model_that_the_host_cannot_compute_is_not_compared(caplog):
    class OnDevice(nn.Linear):
        def forward(self, x):
            raise NotImplementedError("only on a device")

    model = nn.Sequential(OnDevice(4, 4), nn.Linear(4, 4))
    check_chain(make_task(model), [*model], BATCHES)
    assert "fails on the host (NotImplementedError: only on a device)" in caplog.text


def test_what_layers_return_arrives_as_it_was_and_may_be_changed_in_place():
    x = torch.ones(2, requires_grad=True) * 1
    number = torch.tensor(3)
    for value in (
        x, (x, number), [x, (number, 2), None], {"x": (x,), "y": [number, "a"]}, (), {"z": [x, x]},
    ):  # fmt: skip
        spec, tensors = flatten(value)
        given, leaves = make_input(spec, [tensor.detach().clone() for tensor in tensors])
        assert flatten(given)[0] == spec
        grown = [tensor for tensor in flatten(given)[1] if tensor.requires_grad]
        assert len(grown) == len(leaves) == str(value).count("grad_fn")
        for tensor in grown:
            tensor.mul_(3)
        if grown:
            sum(tensor.sum() for tensor in grown).backward()
        assert all(leaf.grad.tolist() == [3, 3] for leaf in leaves)
    assert isinstance(spec, Spec)


def test_draws_of_a_loss_are_those_of_its_seed_and_use_up_none():
    def draw():
        return torch.rand(()).item(), random.random(), np.random.rand()

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    host, drawn = torch.device("cpu"), []
    for seed in (1, 1, (1 << 64) - 1):
        with same_random_numbers(seed, host):
            drawn.append(draw())
    assert drawn[0] == drawn[1] != drawn[2]
    expected = draw()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    assert draw() == expected


def test_a_loss_may_take_entries_out_of_its_batch():
    batch = {"x": BATCHES[0], "y": 1}
    call = capture_call(lambda m, b: m(b.pop("x"), b.pop("y")), nn.Linear(4, 4), batch)
    assert call.args[1] == 1
    assert batch.keys() == {"x", "y"}
