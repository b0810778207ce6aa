"""Layout pipeline on devices whose kind has a library, beside kinds that have none or another."""

import copy
import itertools
import threading
import time
from contextlib import contextmanager, nullcontext
from itertools import pairwise, permutations, product

import fake_library
import pytest
import torch
from collective_cases import values
from fake_device import Stream, current_stream, set_bandwidth, stream
from torch import nn
from torch.nn import functional
from worlds import mostly_in_several_kinds

from kaitian_mpi import Task
from kaitian_mpi.balance.pipeline import Stage
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.run_folder import NoFolder
from kaitian_mpi.runtime.polling import wait_until
from kaitian_mpi.train.layouts.links import measure_links
from kaitian_mpi.train.layouts.peers import PeerGroups, join_stages
from kaitian_mpi.train.layouts.pipeline.chain import chain_of
from kaitian_mpi.train.layouts.pipeline.gradients import StageGradients
from kaitian_mpi.train.layouts.pipeline.measure import find_facts
from kaitian_mpi.train.layouts.pipeline.messages import Activations, Gradients, Outbox
from kaitian_mpi.train.layouts.pipeline.runner import Runner
from kaitian_mpi.train.layouts.pipeline.stages import Stages
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.task import Computation

COUNT = 5  # micro-batches
HELD_TURNS = 20
HELD_SEC = 5e-3  # longer than a message takes
LONG_SEC = 60.0  # in which a message comes, however busy the machine is


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    "replicas",
    [
        pytest.param(1, marks=pytest.mark.thorough(3, 4)),
        pytest.param(2, marks=pytest.mark.thorough(2)),
    ],
)
def test_stages_on_devices_train_like_one_process(world, replicas):
    torch.manual_seed(5)
    layers = [nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 5)]
    ours = nn.Sequential(*layers).double()
    alone = copy.deepcopy(ours)
    singles, ends = world.size - replicas, [1, 3, 4]
    ends = [*ends[:singles], 5]
    ranks = [*((rank,) for rank in range(singles)), tuple(range(singles, world.size))]
    stages = [
        Stage(begin, end, stage_ranks, (1.0,) * len(stage_ranks))
        for begin, end, stage_ranks in zip([0, *ends], ends, ranks, strict=False)
    ]
    task = Task(model=ours, optimizer=lambda m: torch.optim.AdamW(m.parameters()), data=[0])
    optimizers = [*task.make_optimizers(ours), *task.make_optimizers(alone)]
    held = Stages(ours, optimizers[:1], chain_of(task), world.device)
    held.assign_stages(world, stages)
    task = Task(**{**vars(task), "loss": loss})
    waits = lambda name: nullcontext()  # noqa: E731
    computation = Computation(world.device, "fp32", "contiguous")
    peers = join_stages(world, stages)
    links = [{*pair} for one, other in pairwise(stages) for pair in product(one.ranks, other.ranks)]
    alike = [link for link in links if len({world.kinds[rank] for rank in link}) == 1]
    joined = [other for other in range(world.size) if {world.rank, other} in alike]
    assert [other for other in range(world.size) if peers.joins(other)] == joined
    fake_library.calls.clear()
    ours_and_plan = task, held.layers, computation, stages, world.rank, 1
    runner = Runner(*ours_and_plan, waits=waits, peers=peers)
    gradients = StageGradients(held.targets, held.owners, world.rank, waits)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(3, COUNT, 4, 6, dtype=torch.float64, generator=random)
    y = torch.randint(5, (3, COUNT, 4), generator=random)
    for step in range(3):
        rank_numbers = runner.rank_numbers(COUNT)
        batches = {
            number: computation.place((x[step, number], y[step, number])) for number in rank_numbers
        }
        weight = 4.0 * len(rank_numbers) * runner.is_last
        weights = dict.fromkeys(rank_numbers, 1 / COUNT)
        losses = runner.train(COUNT, batches, weights, range(COUNT))
        gradients.backward_done(losses, weight, samples=4 * COUNT)
        gradients.finish()
        assert gradients.factor == 1.0
        assert any("broadcast" in call for call in fake_library.calls) == bool(joined)
        whole = loss(alone, (x[step].flatten(0, 1), y[step].flatten()))
        assert gradients.number.item() == pytest.approx(whole.item(), rel=1e-10), step
        whole.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    gradients.close()
    peers.close()
    for number, (one, other) in enumerate(zip(ours.parameters(), alone.parameters(), strict=True)):
        if world.rank in held.owners[number]:
            assert one.device.type == world.device.type
            assert (values(one) - other).abs().max().item() <= 1e-10
    is_plain = torch._C.DisableTorchFunctionSubclass  # other ranks' parameters are not here
    with is_plain():
        whole = held.collect(world, None).model
    if world.rank == 0:
        for name, value in alone.state_dict().items():
            assert (values(whole[name]) - value).abs().max().item() <= 1e-10


@contextmanager
def computing(device):
    """Have the current stream of a device busy all the while."""
    is_over = threading.Event()
    if device.type != "cpu":
        current_stream(device).give(is_over.wait)
    try:
        yield
    finally:
        is_over.set()


@pytest.mark.sizes(2)
def test_what_comes_by_mpi_does_not_wait_for_computation_and_is_kept_for_it(world, device_of):
    """Also if the script computes on a stream of its own."""
    content = torch.arange(1.0, 5001.0)
    peers = PeerGroups(world.rank, world.device)
    outbox, device = Outbox(lambda name: nullcontext(), peers), world.device
    side_stream = nullcontext() if device.type == "cpu" else stream(Stream(device))
    with side_stream:
        for source, target in ((0, 1), (1, 0)):
            if world.rank == source:
                sent = outbox.send_activations(device_of(content).requires_grad_(), target, 3)
                outbox.wait()
                with computing(device):
                    gradients = Gradients(peers, sent, target, 3)
                    assert wait_until(gradients.is_completed, LONG_SEC)
                gradients.wait()
                with computing(device):
                    gradient = gradients._tensors[0] + 1
                    del gradients  # whose memory is free for what comes next
                assert torch.equal(values(gradient), 2 * content + 1)
            else:
                with computing(device):
                    incoming = Activations(peers, source, 3, device)
                    assert wait_until(incoming.is_completed, LONG_SEC)
                incoming.wait()
                activation, leaves = incoming.take()
                with computing(device):
                    gradient = activation.detach() + 1
                    activation.square().sum().backward()
                    del incoming, activation
                assert torch.equal(values(gradient), content + 1)
                outbox.send_gradients(leaves, source, 3)
                outbox.wait()


@mostly_in_several_kinds
@pytest.mark.sizes(2)
def test_a_link_is_measured_from_device_to_device(world):
    """What passes through the host is copied there and back."""
    bytes_per_sec = 50e6
    set_bandwidth(bytes_per_sec)
    try:
        links = measure_links(world)
    finally:
        set_bandwidth()
    assert {*links} == {"cpu cpu", "cpu vendor", "vendor vendor"} & {
        " ".join(sorted([one.kind, other.kind])) for one, other in permutations(world.infos, 2)
    }
    if "cpu vendor" in links:
        # The difference of two times, each of which a busy machine changes; without the copy it
        # is a tenth of this.
        assert links["cpu vendor"].busy_sec >= 0.5 / bytes_per_sec


@mostly_in_several_kinds
@pytest.mark.sizes(2)
def test_a_link_is_measured_beside_others_that_hold_the_cores(world, monkeypatch):
    """In which each of the first messages takes longer than a large one."""
    turns, synchronize = itertools.count(), World.synchronize

    def late(world):
        synchronize(world)
        if next(turns) < HELD_TURNS:
            time.sleep(HELD_SEC)

    monkeypatch.setattr(World, "synchronize", late)
    if links := measure_links(world):
        assert all(link.busy_sec > 0 for link in links.values())
        assert next(turns) > HELD_TURNS  # it went on until messages came alone


class Wide(nn.Linear):
    """Has for a moment many times its input."""

    def forward(self, x):
        return super().forward(x + x.detach().repeat(1, WIDTH).sum() * 0)


WIDTH = 256


@mostly_in_several_kinds
@pytest.mark.sizes(2)
def test_what_a_layer_has_for_a_moment_is_measured(world):
    """Besides what it keeps, which saved tensors show; on an accelerator."""
    model = nn.Sequential(Wide(64, 64), nn.Linear(64, 5))
    data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.arange(64) % 5)
    task = Task(model=model, optimizer=lambda m: torch.optim.AdamW(m.parameters()), data=data)
    task = Task(**{**vars(task), "loss": loss})
    config = TrainConfig(layout="pipeline", global_batch_size=32)
    layers = find_facts(config, Setup(task, NoFolder()), world, takes_alike=True).layers
    assert 0.9 * WIDTH * 64 * 4 <= layers[0].temporary_bytes <= 1.5 * WIDTH * 64 * 4
    assert layers[1].temporary_bytes < 0.1 * WIDTH * 64 * 4
