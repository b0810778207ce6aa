"""Groups by kind and host, and of ranks that share a device; who is on which host is made up."""

from dataclasses import dataclass, replace

import collective_cases as cases
import contracts
import fake_kinds
import fake_library
import pytest
import torch
import torch.distributed as dist
from choices import by_default
from fake_device import on_device, values
from mpi_session import LAUNCH, use_algorithm
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from uneven import by_hook, by_reducer, check_like_one_process

import kaitian_mpi
from kaitian_mpi import Task, Training
from kaitian_mpi.balance.pipeline import Stage
from kaitian_mpi.devices.choice import LIBRARY_VARIABLE
from kaitian_mpi.distributed.collectives.hybrid import ALGORITHMS, BY_HOST
from kaitian_mpi.distributed.network.allreduce import HostAllreduce
from kaitian_mpi.distributed.startup import open_process_group
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import join_world
from kaitian_mpi.observe.console import show_topology
from kaitian_mpi.runtime.lifecycle import initialize_mpi
from kaitian_mpi.train.layouts.peers import join_stages
from kaitian_mpi.train.measure.allreduce import choose_algorithm


@dataclass(frozen=True)
class Given:
    group_by: str
    devices: str
    nodes: tuple[int, ...]
    library: str


WORLDS = {
    2: [Given("kind-and-host", "vendor,vendor", (0, 1), "nccl")],
    3: [Given("kind-and-host", "vendor,vendor,cpu", (0, 0, 1), "hccl")],
    4: [
        Given("auto", "vendor,vendor,vendor,cpu", (0, 0, 1, 1), "nccl"),
        Given("kind-and-host", "vendor,vendor2,vendor,vendor2", (0, 0, 1, 1), "mccl"),
        Given("kind-and-host", "vendor,vendor,vendor,vendor", (0, 0, 1, 1), "xccl"),
    ],
}.get(LAUNCH.world_size, [None])
pytestmark = pytest.mark.ranks(2)

# Of 4 ranks; groups by kind and host are those of 2 as well.
mostly_by_kind = pytest.mark.parametrize("world", by_default(WORLDS, WORLDS[:1]), indirect=True)
mostly_by_leader = pytest.mark.parametrize(
    "algorithm", by_default([*ALGORITHMS, *BY_HOST], ["leader", *BY_HOST]), indirect=True
)


@pytest.fixture(scope="module", params=by_default(WORLDS, WORLDS[:2]))
def world(request):
    given = request.param
    contracts.choose(given.library)
    if dist.is_initialized():
        dist.destroy_process_group()
    joined = kaitian_mpi.init(devices=given.devices, group_by=given.group_by)
    dist.destroy_process_group()
    infos = [replace(info, node=node) for info, node in zip(joined.infos, given.nodes, strict=True)]
    made = replace(joined, infos=tuple(infos))
    open_process_group(made)
    return made


@pytest.fixture(params=[*ALGORITHMS, *BY_HOST])
def algorithm(request, world):
    if request.param not in dist.group.WORLD.host.algorithms:
        assert request.param in BY_HOST
        assert world.communication.group_by != "auto"
        pytest.skip("all groups are by kind and host")
    use_algorithm(request.param)
    return request.param


@mostly_by_leader
def test_sums_and_averages(world, device_of, algorithm):
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int16):
        for number, length in enumerate([1, 1_000, 70_001] if dtype is torch.float32 else [1_000]):
            cases.check_sum(world, device_of, dtype, length, in_background=bool(number % 2))
    for dtype in (torch.float32, torch.bfloat16):
        cases.check_sum(world, device_of, dtype, 600_000, in_background=True)
        cases.check_average(world, device_of, dtype)


@mostly_by_kind
def test_operations_other_than_all_reduce(world, device_of):
    for length in (7, 70_001):
        cases.check_moves(world, device_of, torch.float32, length, range(world.size))
        cases.check_reductions(world, device_of, torch.float32, length)
    cases.check_uneven_parts(world, device_of)


@mostly_by_kind
@mostly_by_leader
def test_ddp_has_the_gradient_of_the_whole_batch(world, algorithm):
    check_like_one_process(world, by_hook)


def test_no_library_connects_hosts_and_the_lane_crosses_them_once_for_all_kinds(
    world, device_of, algorithm, monkeypatch
):
    connected, crossed = [], []
    create, run = fake_kinds.VendorDevice.create_vendor_group, HostAllreduce.run

    def noting_size(self, store, rank, size, timeout):
        connected.append(size)
        return create(self, store, rank, size, timeout)

    def noting_hosts(self, tensor, op, route):
        crossed.append(self._hosts)
        run(self, tensor, op, route)

    monkeypatch.setattr(fake_kinds.VendorDevice, "create_vendor_group", noting_size)
    monkeypatch.setattr(HostAllreduce, "run", noting_hosts)
    monkeypatch.setattr(world.communication, "network_allreduce", "ring")
    group = dist.new_group()
    group.host.algorithm = algorithm
    tensor = device_of(torch.full((400_000,), world.rank + 1.0))
    dist.all_reduce(tensor, group=group)
    assert values(tensor).unique().tolist() == [float(cases.factor(world))]
    dist.destroy_process_group(group)
    if algorithm == "flat" or world.info.kind == "cpu":
        assert connected == []
    else:
        alike = [info for info in world.infos if info.kind == world.info.kind]
        here = [info for info in alike if info.node == world.info.node]
        by_kind = world.communication.group_by == "auto" and algorithm in ALGORITHMS
        size = len(alike if by_kind else here)
        assert connected == ([size] if size > 1 else [])  # a single rank needs no library
    if algorithm == "leader-by-host":
        # Of the leaders of vendor on host 0, and vendor and cpu on host 1.
        assert set(crossed) == ({((0,), (1, 2))} if world.rank != 1 else set())


@mostly_by_kind
def test_the_measurement_covers_both_and_the_table_says_that_groups_are_by_host(world, capsys):
    show_topology(world)
    if world.rank == 0:
        text = capsys.readouterr().out
        assert f"{world.size} ranks, {len(world.groups)} groups" in text
        assert ("groups by kind and host" in text) == (
            world.communication.group_by == "kind-and-host"
        )
    group = dist.group.WORLD
    measured = choose_algorithm(group, "auto", [10_000], world.device)
    assert tuple(measured) == group.host.algorithms
    expected = [*ALGORITHMS, *(BY_HOST if world.communication.group_by == "auto" else ())]
    assert list(measured) == expected
    assert set(gather_values(world.comm, group.host.algorithm)) == {min(measured, key=measured.get)}
    assert choose_algorithm(group, "leader", [10_000], world.device) == {}
    assert group.host.algorithm == "leader"
    if "leader-by-host" not in measured:  # as remembered from before a loss
        assert set(choose_algorithm(group, "leader-by-host", [100], world.device)) == set(measured)


def test_a_subset_of_the_ranks_follows_the_same_rule(world, device_of):
    made = dist.new_group(list(range(world.size - 1)))
    if world.rank < world.size - 1:
        nodes = {info.node for info in world.infos[:-1]}
        kinds = {info.kind for info in world.infos[:-1]}
        is_by_host = world.communication.group_by == "kind-and-host"
        assert made.has_one_group == (len(kinds) == 1 and (len(nodes) == 1 or not is_by_host))
        tensor = device_of(torch.ones(5_000))
        dist.all_reduce(tensor, group=made)
        assert values(tensor).unique().tolist() == [world.size - 1.0]
        dist.destroy_process_group(made)


@pytest.mark.sizes(2)
@pytest.mark.parametrize("devices", ["vendor,vendor", "vendor,cpu"])
def test_ranks_whose_torch_lacks_the_library_use_host_memory(monkeypatch, devices):
    """As with torch for Jetson, which has no NCCL."""
    contracts.choose("nccl")
    monkeypatch.delitem(dist.Backend._plugins, fake_library.NAME.upper())
    if dist.is_initialized():
        dist.destroy_process_group()
    world = kaitian_mpi.init(devices=devices)
    calls = list(fake_library.calls)
    assert {info.library for info in world.infos} == {""}
    assert bool(world.device_kind.missing_library()) == (world.info.kind == "vendor")
    for length in (5, 100_000):
        put = on_device if world.info.kind == "vendor" else torch.clone
        tensor = put(torch.full((length,), world.rank + 1.0))
        dist.all_reduce(tensor)
        assert values(tensor).unique().tolist() == [3.0]
    assert fake_library.calls == calls
    dist.destroy_process_group()


def losses_of(layout):
    """Return the losses of a `Training`, which tell the weights: a pipeline's are divided."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5)).double()
    data = torch.randn(48, 6, generator=torch.Generator().manual_seed(1)).double()
    task = Task(
        model=model,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        data=TensorDataset(data, torch.arange(48) % 5),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
    )
    settings = {"layout": layout, "balance": "off", "parity": False, "progress": "none"}
    settings |= {"global_batch_size": 8, "epochs": 1, "benchmark_seconds": 0.1}
    with Training(task, **settings) as training:
        return [step.loss for step in training]


@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    ("layout", "devices"),
    [
        *((layout, "vendor,vendor") for layout in ("shard", "pipeline")),
        # That which `test_no_rank_uses_the_library_if_one_declines_it` shows as well.
        pytest.param("replicate", "vendor,vendor", marks=pytest.mark.thorough),
        # Whose groups communicate through host memory anyway.
        pytest.param("pipeline", "vendor,cpu", marks=pytest.mark.thorough),
    ],
)
def test_a_training_without_the_library_has_the_numbers_of_one_with_it(layout, devices):
    contracts.choose("nccl")
    losses = []
    for uses_library in (True, False):
        if dist.is_initialized():
            dist.destroy_process_group()
        world = kaitian_mpi.init(devices=devices, vendor_library=uses_library)
        before = len(fake_library.calls)
        losses.append(losses_of(layout))
        calls = len(fake_library.calls) - before
        is_joined = uses_library and devices == "vendor,vendor"
        assert bool(calls) == is_joined
        assert world.communication.describe()["vendor_library"] == uses_library
    dist.destroy_process_group()
    assert len(set(losses[0])) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("by_variable", by_default([True, False], [True]))
def test_no_rank_uses_the_library_if_one_declines_it(caplog, monkeypatch, by_variable):
    contracts.choose("nccl")
    if dist.is_initialized():
        dist.destroy_process_group()
    declines = LAUNCH.world_rank == 1
    if by_variable and declines:
        monkeypatch.setenv(LIBRARY_VARIABLE, "0")
    devices = ",".join(["vendor"] * LAUNCH.world_size)
    # As of the commands, whose flag may differ between ranks.
    comm = initialize_mpi()
    monkeypatch.setattr("kaitian_mpi.mpi.world._current", None)
    with caplog.at_level("WARNING"):
        world = join_world(comm, devices, vendor_library=by_variable or not declines)
    said = [record.getMessage() for record in caplog.records]
    line = (
        "fakeccl is not used, by --no-vendor-library or KAITIAN_VENDOR_LIBRARY=0 on rank 1: groups "
        "communicate through host memory, which is slower; omit it to use the vendor's library"
    )
    assert [line in each for each in said] == ([True] if world.rank == 0 else [])
    open_process_group(world)
    assert {info.library for info in world.infos} == {""}
    calls = list(fake_library.calls)
    for length in (5, 100_000):
        tensor = on_device(torch.full((length,), world.rank + 1.0))
        dist.all_reduce(tensor)
        assert values(tensor).unique().tolist() == [float(cases.factor(world))]
    check_like_one_process(world, by_hook)
    check_like_one_process(world, by_reducer)
    stages = [Stage(rank, rank + 1, (rank,), (1.0,)) for rank in range(world.size)]
    peers = join_stages(world, stages)
    assert not any(map(peers.joins, range(world.size)))
    assert fake_library.calls == calls
    dist.destroy_process_group()


@pytest.mark.sizes(2)
def test_a_wrong_value_of_its_variable_is_the_same_error_on_all_ranks(monkeypatch):
    if dist.is_initialized():
        dist.destroy_process_group()
    if LAUNCH.world_rank == 1:
        monkeypatch.setenv(LIBRARY_VARIABLE, "off")
    error = "rank 1: KAITIAN_VENDOR_LIBRARY is 'off'; set it to 0, so that no vendor's library is"
    with pytest.raises(AgreedError, match=error):
        kaitian_mpi.init(devices="vendor,vendor")


@pytest.mark.sizes(2)
def test_two_ranks_on_one_device_are_refused_or_use_host_memory(capsys):
    devices = f"vendor:{fake_kinds.SHARED},vendor:{fake_kinds.SHARED}"
    if dist.is_initialized():
        dist.destroy_process_group()
    pair = r"rank 0 \(\S+, \S+ \S+\) and rank 1 \(.*\)"
    refused = rf"{pair} share one device \(shared\), which \S+ refuses within a group"
    with pytest.raises(AgreedError, match=refused) as raised:
        kaitian_mpi.init(devices=devices)
    assert "--share-device" in str(raised.value)
    world = kaitian_mpi.init(devices=devices, share_device=True)
    assert world.kinds == ("vendor", "vendor")
    calls = list(fake_library.calls)
    tensor = on_device(torch.full((5,), world.rank + 1.0))
    dist.all_reduce(tensor)
    assert values(tensor).tolist() == [3.0] * 5
    alone = [dist.new_group([rank]) for rank in range(2)][world.rank]
    assert fake_library.calls == calls
    dist.all_reduce(tensor, group=alone)  # which needs neither library nor host memory
    assert values(tensor).tolist() == [3.0] * 5
    assert fake_library.calls == calls
    show_topology(world)
    if world.rank == 0:
        line = "share one device: group vendor communicates through host memory, not by fakeccl"
        assert line in " ".join(capsys.readouterr().out.split())
    dist.destroy_process_group()
