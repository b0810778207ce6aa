"""Emulated slowdowns of a script's own collectives and messages, on the last rank."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from samples import linear_task

from kaitian_mpi import Training
from kaitian_mpi.devices import pace
from kaitian_mpi.devices.emulation import describe_slowdown
from kaitian_mpi.distributed.collectives.router import Router
from kaitian_mpi.mpi.world import set_current_world

pytestmark = pytest.mark.sizes(2)

COMPUTING_SEC = 0.03


@pytest.fixture
def slept(monkeypatch):
    """The sleeps of this process."""
    sleeps = []

    def sleep(seconds):
        sleeps.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(pace, "time", SimpleNamespace(thread_time=time.thread_time, sleep=sleep))
    return sleeps


@pytest.fixture
def slowed(world, last):
    """The world with a last rank that is three times slower."""
    emulation = world.emulation.with_slowdown(f"{last}:3")
    device = emulation.wrap(world.device_kind, world.rank, "cpu")
    texts = [*map(describe_slowdown, emulation.schedules)]
    infos = [replace(info, slowdown=texts[info.world_rank]) for info in world.infos]
    slowed = replace(world, emulation=emulation, device_kind=device, infos=tuple(infos))
    yield set_current_world(slowed)
    set_current_world(world)


@pytest.fixture
def groups(slowed):
    made = dist.new_group(), dist.new_group()
    yield made
    for group in made:
        dist.destroy_process_group(group)


def compute():
    begin = time.thread_time()
    while time.thread_time() - begin < COMPUTING_SEC:
        pass


def test_a_rank_sleeps_for_what_it_computed_between_any_two_calls(world, last, groups, slept):
    """The others are late, so that it waits in each call, and for each asynchronous one."""
    tensor, (first, second) = torch.ones(200_000), groups
    peer = last - world.rank

    def exchange():
        received = dist.irecv(torch.empty(3), peer, group=first)
        dist.isend(torch.ones(3), peer, group=first).wait()
        received.wait()

    calls = (
        lambda: dist.all_reduce(tensor, group=first),
        lambda: dist.all_reduce(tensor, group=second, async_op=True).wait(),
        lambda: dist.barrier(group=second),
        exchange,
        lambda: dist.all_gather_object([None] * world.size, "text", group=first),
    )
    dist.barrier(group=first)  # starts the measurement
    for call in calls:
        if world.rank != last:
            time.sleep(4 * COMPUTING_SEC)
        compute()
        call()
    if world.rank == last:
        assert sum(slept) == pytest.approx(2 * COMPUTING_SEC * len(calls), rel=0.2)
    else:
        assert slept == []
        assert first._run.__func__ is Router.run  # nothing stands between


def test_a_training_slows_its_steps_alone(world, last, slowed, groups, slept, shared_path):
    group = groups[0]
    folder = shared_path / "run"
    settings = {"global_batch_size": 16, "epochs": 1, "balance": "off", "log_interval": 60.0}
    dist.barrier(group=group)
    task = linear_task(4, data=torch.ones(64, 4))
    with Training(task, **settings, run_dir=str(folder)) as training:
        for _ in training:
            compute()
            dist.barrier(group=group)
    assert sum(slept) < COMPUTING_SEC  # not for the computing of the script itself
    slept.clear()
    assert training.summary.emulated
    saved = json.loads((folder / "config.json").read_text())
    assert saved["emulate_slowdown"] == f"{last}:3"
    dist.barrier(group=group)
    compute()
    dist.barrier(group=group)
    assert sum(slept) == pytest.approx(2 * COMPUTING_SEC if world.rank == last else 0, rel=0.2)
