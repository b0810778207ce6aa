"""GradientReducer on accelerators with streams: its sums come after what computes the gradients."""

import copy

import pytest
import torch
import torch.distributed as dist
from fake_device import DeviceTensor, on_device, values
from test_vendor import agree, small_network
from torch import nn
from torch.nn.functional import cross_entropy

from kaitian_mpi.distributed.collectives.hybrid import ALGORITHMS
from kaitian_mpi.distributed.reducer import GradientReducer

STEPS = 4


@pytest.fixture(params=ALGORITHMS, autouse=True)
def algorithm(request, world):
    dist.group.WORLD.algorithm = request.param


@pytest.mark.parametrize("bucket_caps", [(2000, 4000), (1 << 20, 1 << 20)])
def test_uneven_ranks_train_like_one_process(world, bucket_caps):
    shares = [7, 0, 5, 3][: world.size]
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(STEPS, sum(shares), 3, 8, 8, generator=generator).double()
    labels = torch.randint(5, (STEPS, sum(shares)), generator=generator)
    alone = small_network()
    model = copy.deepcopy(alone).to(world.device)
    reducer = GradientReducer(model, bucket_caps=bucket_caps)
    networks = (alone, model)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.05, momentum=0.9) for n in networks]
    begin = sum(shares[: world.rank])
    own = slice(begin, begin + shares[world.rank]) if shares[world.rank] else slice(0, 1)
    for step in range(STEPS):
        cross_entropy(alone(images[step]), labels[step]).backward()
        reducer.arm(shares[world.rank] / sum(shares))
        output = model(images[step, own].to(world.device))
        cross_entropy(output, labels[step, own].to(world.device)).backward()
        reducer.finish()
        assert reducer.is_finite()
        for parameter in model.parameters():
            assert agree(world, parameter.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(ours, DeviceTensor) == (world.info.kind != "cpu")
        assert (values(ours.detach()) - theirs).abs().max().item() <= 1e-12
    reducer.close()


def test_parameters_that_some_ranks_do_not_use(world):
    on_host = world.info.kind == "cpu"
    put = torch.clone if on_host else on_device
    model = nn.ParameterList([nn.Parameter(put(torch.ones(n))) for n in (5, 20_000, 7, 30)])
    reducer = GradientReducer(model)
    factor = world.size * (world.size + 1) / 2
    for _ in range(2):
        for parameter in model:
            parameter.grad = None
        used = [model[0], model[1], *([model[2]] if world.rank == 0 else [])]
        reducer.arm((world.rank + 1) / 2)
        sum((parameter * 2.0).sum() for parameter in used).backward()
        reducer.finish()
        assert torch.equal(values(model[0].grad), torch.full((5,), factor))
        assert torch.equal(values(model[1].grad), torch.full((20_000,), factor))
        assert torch.equal(values(model[2].grad), torch.full((7,), 1.0))
        assert model[3].grad is None
        assert reducer.is_finite()
    reducer.close()
