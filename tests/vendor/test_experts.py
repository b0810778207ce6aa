"""Mixtures of experts on devices with a library, beside kinds that have none or another."""

import copy
from contextlib import nullcontext

import fake_library
import pytest
import torch
import torch.distributed as dist
from collective_cases import values
from torch import nn

from kaitian_mpi import Experts
from kaitian_mpi.train.layouts.experts.exchange import TokenExchange

pytestmark = [pytest.mark.sizes(2, 3, 4), pytest.mark.thorough(4)]

WIDTH, TOKENS = 8, [11, 0, 17, 5]
OWNERS = {2: [0, 1, 0, 1, 1], 3: [2, 0, 1, 1, 2], 4: [3, 0, 2, 1, 0]}


def mixture():
    torch.manual_seed(3)
    experts = [
        nn.Sequential(nn.Linear(WIDTH, 4 * n), nn.Tanh(), nn.Linear(4 * n, WIDTH))
        for n in range(1, 6)
    ]
    return Experts(experts, nn.Linear(WIDTH, 5)).double()


@pytest.mark.parametrize("chunks", [0, pytest.param(1, marks=pytest.mark.thorough), 3])
def test_tokens_that_travel_are_computed_as_in_one_process(world, chunks):
    """Outputs, and the gradients of tokens, the gate and experts; on ranks with no tokens, too."""
    tokens = TOKENS[: world.size]
    generator = torch.Generator().manual_seed(7)
    given = torch.randn(2, sum(tokens), WIDTH, generator=generator, dtype=torch.float64)
    alone = mixture()
    ours = copy.deepcopy(alone).to(world.device)
    expected = []
    for step in given:
        inputs = step.clone().requires_grad_()
        result = alone(inputs)
        (result.square().sum() + alone.balance_loss).backward()
        expected.append((result.detach(), inputs.grad, alone.tokens_by_expert))
    owners = OWNERS[world.size]
    exchange = TokenExchange(
        world, {"": ours}, [owners], chunks, lambda what: nullcontext(), lambda: None
    )
    fake_library.calls.clear()
    begin, count = sum(tokens[: world.rank]), tokens[world.rank]
    for step, (result, gradient, counts) in zip(given, expected, strict=True):
        part = step[begin : begin + count].to(world.device).requires_grad_()
        exchange.begin(count > 0, 1.0)
        found = ours(part)
        (found.square().sum() + ours.balance_loss).backward()
        exchange.finish_backward()
        assert ours.tokens_by_expert == counts
        assert (values(found) - result[begin : begin + count]).abs().sum() <= 1e-12
        assert (values(part.grad) - gradient[begin : begin + count]).abs().sum() <= 1e-12
    for number, owner in enumerate(owners):
        pairs = zip(
            ours.experts[number].parameters(), alone.experts[number].parameters(), strict=True
        )
        for parameter, other in pairs:
            if owner != world.rank or other.grad is None:
                assert parameter.grad is None
            else:
                assert (values(parameter.grad) - other.grad).abs().max() <= 1e-12
    for parameter, other in zip(ours.gate.parameters(), alone.gate.parameters(), strict=True):
        total = values(parameter.grad).clone()
        dist.all_reduce(total)
        assert (total - other.grad).abs().max() <= 1e-12
    exchange.close()
    has_library = exchange.dispatcher.links.joined != []
    assert ("all_to_all_single" in fake_library.calls) == has_library
