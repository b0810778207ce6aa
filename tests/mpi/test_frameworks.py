"""torch libraries on top of a process group, unmodified, between ranks of two device kinds."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from choices import by_default
from collective_cases import agree
from torch import nn
from torch.distributed import nn as autograd_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi import data_parallel

# torch's own notes about its older parts.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.sizes(1, 3)]


def one_step(model, size=4):
    model(torch.ones(2, size)).sum().backward()


def parameters_agree(world, module):
    return agree(world, torch.cat([p.detach().reshape(-1) for p in module.parameters()]))


def test_device_mesh_and_subgroups(world):
    mesh = init_device_mesh("cpu", (world.size,))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=mesh.get_group())
    assert tensor.item() == world.size
    alone, _ = dist.new_subgroups(1)
    dist.all_reduce(tensor, group=alone)
    assert tensor.item() == world.size


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("length", [1, 100_003])
def test_gathering_into_a_list_or_a_tensor(world, length):
    """Accelerate's `gather` does either, by the backend that suits a rank's own device."""
    own = torch.full((length,), float(world.rank))
    whole = torch.empty(world.size * length)
    if world.rank == 0:
        dist.all_gather_into_tensor(whole, own)
    else:
        dist.all_gather(list(whole.split(length)), own)
    assert whole[::length].tolist() == [*range(world.size)]


@pytest.mark.sizes(4)
def test_device_mesh_slices(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name, members in (
        ("replicate", [world.rank % 2, world.rank % 2 + 2]),
        ("shard", [world.rank // 2 * 2, world.rank // 2 * 2 + 1]),
    ):
        tensor = torch.tensor([float(world.rank)])
        dist.all_reduce(tensor, group=mesh[name].get_group())
        assert tensor.item() == sum(members)


def test_functional_collectives(world):
    group, size = dist.group.WORLD, world.size
    ones = torch.ones(4)
    summed = functional.wait_tensor(functional.all_reduce(ones, "sum", group))
    assert summed.tolist() == [float(size)] * 4
    gathered = functional.wait_tensor(functional.all_gather_tensor(ones * world.rank, 0, group))
    assert gathered[::4].tolist() == [float(rank) for rank in range(size)]
    scattered = functional.reduce_scatter_tensor(torch.ones(2 * size), "sum", 0, group)
    assert functional.wait_tensor(scattered).tolist() == [float(size)] * 2
    swapped = functional.all_to_all_single(
        torch.full((size,), float(world.rank)), None, None, group
    )
    assert functional.wait_tensor(swapped).tolist() == [float(rank) for rank in range(size)]


def test_collectives_with_gradients(world):
    tensor = torch.ones(3, requires_grad=True)
    autograd_collectives.functional.all_reduce(tensor).sum().backward()
    assert tensor.grad.tolist() == [float(world.size)] * 3
    sent = torch.full((world.size,), 2.0, requires_grad=True)
    received = torch.empty(world.size)
    received = autograd_collectives.functional.all_to_all_single(received, sent)
    (received * (world.rank + 1)).sum().backward()
    assert sent.grad.tolist() == [float(rank + 1) for rank in range(world.size)]


def test_ddp_with_torchs_communication_hooks(world):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    compressed = DistributedDataParallel(nn.Linear(4, 4, bias=False))
    compressed.register_comm_hook(None, default_hooks.fp16_compress_hook)
    one_step(compressed)
    assert torch.allclose(compressed.module.weight.grad, torch.full((4, 4), 2.0))
    low_rank = DistributedDataParallel(nn.Linear(64, 64))
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    low_rank.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        low_rank(torch.rand(2, 64)).sum().backward()
    gradient = low_rank.module.weight.grad.clone()
    dist.all_reduce(gradient, dist.ReduceOp.AVG)
    assert torch.allclose(gradient, low_rank.module.weight.grad, atol=1e-5)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, data_parallel])
def test_ddp_with_sparse_gradients(world, wrap):
    model = wrap(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)))
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([[world.rank, 9]])).sum().backward()
    gradient = model.module[0].weight.grad
    assert gradient.is_sparse
    rows = gradient.to_dense()
    assert all(rows[rank].any() for rank in [*range(world.size), 9])
    assert not rows[world.size : 9].any()
    row = model.module[1].weight.detach().sum(0)
    assert torch.allclose(rows[9], row)
    assert torch.allclose(rows[0], row / world.size)


def test_queries_of_a_group_by_the_compiler_and_its_cache(world, monkeypatch):
    from torch.distributed import distributed_c10d

    group, cuda = dist.group.WORLD, torch.device("cuda")
    original, calls = type(group)._get_backend, []

    def get_backend(group, device):
        calls.append((group, device, original(group, device)))
        return calls[-1][-1]

    monkeypatch.setattr(type(group), "_get_backend", get_backend)
    monkeypatch.setattr(type(group), "_device_types", [cuda])  # as where torch has found one
    # Called by torch's inductor when it finds a result in its cache on the disk.
    distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
    if not hasattr(dist.ProcessGroup, "_add_ephemeral_timeout"):  # torch before 2.14
        assert (group, cuda, group) in calls


def in_background(x, group):
    y = x * 2
    work = dist.all_reduce(y, group=group, async_op=True)
    work.wait()
    return y + 1


def in_sync_after_a_break(x, group):
    y = x * 2
    torch._dynamo.graph_break()
    dist.all_reduce(y, group=group)
    dist.reduce(y, 0, group=group)  # torch has no traceable form of it
    return y + 1


def by_messages(x, group):
    y, rank, size = torch.zeros_like(x), dist.get_rank(), dist.get_world_size()
    sent = dist.isend(x, (rank + 1) % size, group=group)
    received = dist.irecv(y, (rank - 1) % size, group=group)
    for work in (sent, received):
        work.wait()
    return y + 1


def by_a_future(x, group):
    y = x * 2
    work = dist.all_reduce(y, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0] + 1).wait()


@pytest.mark.thorough
@pytest.mark.sizes(3)
@pytest.mark.parametrize(
    "function",
    [
        by_messages,
        in_background,
        in_sync_after_a_break,
        by_a_future,
    ],
)
def test_collectives_at_graph_breaks_of_compiled_functions(world, function):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    for _ in range(2):
        x = torch.ones(4) * (world.rank + 1)
        expected = function(x.clone(), dist.group.WORLD)
        assert torch.equal(compiled(x, dist.group.WORLD), expected)


@pytest.mark.parametrize(
    "wrap", by_default([DistributedDataParallel, data_parallel], [data_parallel], ranks=(1,))
)
def test_compiled_ddp(world, wrap):
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager, model = wrap(nn.Linear(4, 4)), wrap(nn.Linear(4, 4))
    model.load_state_dict(eager.state_dict())
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        for network in (eager, compiled):
            network.zero_grad()
            network(torch.full((2, 4), float(world.rank))).sum().backward()
        assert torch.equal(eager.module.weight.grad, model.module.weight.grad)


def test_join_with_uneven_inputs(world):
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    with model.join():
        for _ in range(world.rank + 1):
            one_step(model)
            optimizer.step()
            steps += 1
    assert steps == world.rank + 1
    assert parameters_agree(world, model)


@pytest.mark.thorough
def test_zero_redundancy_optimizer(world):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    before = model.module.weight.detach().clone()
    one_step(model)
    optimizer.step()
    assert not torch.equal(before, model.module.weight)
    assert parameters_agree(world, model)


def test_fully_sharded_training_equals_plain_training(world):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).double()
    sharded = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).double()
    sharded.load_state_dict(plain.state_dict())
    mesh = init_device_mesh("cpu", (world.size,))
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    inputs = torch.randn(2 * world.size, 8, dtype=torch.float64)
    dist.broadcast(inputs, 0)
    for model, batch in ((plain, inputs), (sharded, inputs[2 * world.rank : 2 * world.rank + 2])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.full_tensor(), theirs, atol=1e-12)


@pytest.mark.thorough(1)
def test_distributed_checkpoint(world, tmp_path):
    import torch.distributed.checkpoint as checkpoint

    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder, 0)
    state = {"shared": torch.arange(4.0)}
    checkpoint.async_save(state, checkpoint_id=folder[0]).result()
    dist.barrier()
    loaded = {"shared": torch.zeros(4)}
    checkpoint.load(loaded, checkpoint_id=folder[0])
    assert loaded["shared"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_capabilities_reported_to_torch(world):
    group = dist.group.WORLD
    for device in map(torch.device, ("cpu", "cuda")):
        backend = group._get_backend(device)
        assert not backend.supports_coalescing
        assert not backend.supports_shrinking
        assert not backend.supports_splitting
        assert not backend.supports_time_estimate
        assert not backend.supports_tensor_alloc(device)


@pytest.mark.ranks(2)
def test_pipeline_stages(world):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(world.size)]
    stage = PipelineStage(layers[world.rank], world.rank, world.size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4)
    inputs = torch.ones(8, 8)
    output = schedule.step(inputs) if world.rank == 0 else schedule.step()
    if world.rank == world.size - 1:
        assert torch.allclose(output, nn.Sequential(*layers)(inputs), atol=1e-6)
