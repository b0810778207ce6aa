"""Every wait ends: errors name the missing rank, and destroying a group needs no other rank."""

import gc
import os
import socket
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from kaitian_mpi.distributed import message_thread
from kaitian_mpi.distributed.collectives import arrivals
from kaitian_mpi.errors import CollectiveError, UnsupportedError
from kaitian_mpi.mpi import store as mpi_store
from kaitian_mpi.mpi import topology

SHORT = timedelta(seconds=1)
LONG = timedelta(seconds=60)
SOON_SEC = 20  # if the timeout is LONG

pytestmark = pytest.mark.sizes(3)


def add(group=None):
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def fails(call, message, after_sec=0.0):
    """Check that a call raises this error, soon."""
    began = time.monotonic()
    with pytest.raises(CollectiveError, match=message):
        call()
    assert after_sec <= time.monotonic() - began < SOON_SEC


@pytest.fixture(autouse=True)
def looking_often(monkeypatch):
    """Let a rank that waits soon look for others that are late, lost or have ended the group."""
    monkeypatch.setattr(arrivals, "_RECORD_AFTER_SEC", 0.1)
    monkeypatch.setattr(arrivals, "_EVENTS_INTERVAL_SEC", 0.1)
    monkeypatch.setattr(message_thread, "_LEFT_INTERVAL_SEC", 0.1)


@contextmanager
def group_of_all(world, timeout=LONG, ended_by=None):
    """A group that no rank but `ended_by` destroys while others still wait in it."""
    group = dist.new_group(timeout=timeout)
    yield group
    add()
    if world.rank != ended_by:
        dist.destroy_process_group(group)
    assert add() == world.size


def meet_without_python(comm):
    """Wait for all ranks, with the interpreter lock held.

    mpi4py duplicates a communicator, holding that lock, for the first allreduce of objects on it.
    """
    assert comm.allreduce(1) == comm.size
    comm.Free()


def test_groups_may_be_destroyed_in_any_order_without_waiting_for_other_ranks(world):
    groups = [dist.new_group() for _ in range(world.size + 1)]
    for group in groups:
        add(group)
    group, *others = groups
    if world.rank == 0:
        dist.destroy_process_group(group)
    assert add() == world.size
    if world.rank == 0:
        with pytest.raises((CollectiveError, ValueError)):
            add(group)
        with pytest.raises(CollectiveError, match=r"^all_reduce: .* been destroyed"):
            group.allreduce([torch.zeros(1)])
        with pytest.raises(CollectiveError, match=r"^recv: this process group has been destroyed"):
            group.recv([torch.zeros(1)], 1, 0)
    else:
        dist.destroy_process_group(group)
    for index in range(len(others)):
        dist.destroy_process_group(others[(index + world.rank) % len(others)])
    assert add() == world.size
    own = {id(group.comms) for group in groups}
    deadline = time.monotonic() + SOON_SEC
    while own & {id(comms) for _, comms in topology._to_free}:  # not yet freed
        topology.free_unused_comms()
        assert time.monotonic() < deadline


def test_no_rank_waits_for_rank_0_while_it_does_not_let_python_run(world, monkeypatch):
    """A time-out ends as well: only rank 0's store knows who is missing, so it names nobody."""
    monkeypatch.setattr(mpi_store, "_MARGIN_SEC", 0.5)
    group, late = dist.new_group([1, 2]), dist.new_group([1, 2], timeout=SHORT)
    comm = world.comm.Dup()
    add()  # the groups are made
    if world.rank > 0:
        time.sleep(world.rank / 4)  # rank 1 waits for rank 2 so long that it looks for lost ranks
        assert add(group) == 2
        if world.rank == 1:
            received = torch.zeros(3)
            dist.recv(received, 2, group=group)
            assert received.tolist() == [2.0] * 3
            message = "rank 0, which serves the store, has not answered within 1 s"
            fails(lambda: add(late), f"^all_reduce #1: {message}")
        else:
            time.sleep(0.25)
            dist.send(torch.full((3,), 2.0), 1, group=group)
    meet_without_python(comm)
    if world.rank > 0:
        for each in (group, late):
            dist.destroy_process_group(each)
    assert add() == world.size


@pytest.mark.parametrize("length", [3, 300_000], ids=["short", "long"])
def test_waiting_for_a_rank_that_has_destroyed_the_group_raises(world, last, length):
    with group_of_all(world, ended_by=last) as group:
        add(group)
        if world.rank == last:
            dist.destroy_process_group(group)
        else:
            fails(
                lambda: dist.all_reduce(torch.ones(length), group=group),
                rf"^rank {last} of {world.size} ended the group before all_reduce #2",
            )
            failed_before = f"send: this process group failed before: rank {last} of"
            fails(lambda: dist.send(torch.ones(1), last, group=group), f"^{failed_before}")


@pytest.mark.parametrize(
    ("call", "length", "waiting_for"),
    [
        (dist.recv, 3, "a message from rank 0 of {size}"),
        (dist.send, 2_000_000, "rank 0 of {size} to receive"),
    ],
    ids=["recv", "send"],
)
def test_an_unmatched_message_times_out(world, last, one_second_group, call, length, waiting_for):
    if world.rank == last:
        group, reason = one_second_group, waiting_for.format(size=world.size)
        message = rf"^timed out after 1 s in {call.__name__}: waiting for {reason}$"
        fails(lambda: call(torch.zeros(length), 0, group=group), message, after_sec=0.9)
        failed_before = "this process group failed before: timed"
        fails(lambda: dist.send(torch.zeros(3), 0, group=group), f"^send: {failed_before}")
        fails(lambda: add(group), f"^all_reduce: {failed_before}")
    assert add() == world.size


def test_a_message_that_failed_keeps_only_what_mpi_may_access(world, last, one_second_group):
    """Its error refers to the frames that waited for it, and so to a step's activations."""

    class Activations:
        """What a frame that waits has."""

    def wait():
        activations = Activations()
        work = dist.isend(torch.zeros(2_000_000), 0, group=one_second_group)
        fails(work.wait, "^timed out")
        return weakref.ref(activations)

    if world.rank == last:
        activations = wait()
        gc.collect()
        assert activations() is None
    assert add() == world.size


def test_a_groups_timeout_can_be_changed(world, last):
    with group_of_all(world) as group:
        add(group)
        group.set_timeout(SHORT)
        if world.rank == last:
            named = "recv: waiting for a message from rank 0"
            call = lambda: group.recv([torch.zeros(3)], 0, 0).wait()  # noqa: E731
        else:
            named, call = f"all_reduce #2: waiting for rank {last}", lambda: add(group)
        fails(call, rf"^timed out after 1 s in {named} of {world.size}")


def test_a_message_to_a_rank_outside_the_group_is_rejected(world):
    for call in (dist.send, dist.recv):
        with pytest.raises(UnsupportedError, match=f"there is no rank 9 of {world.size}; use"):
            call(torch.ones(1), 9)
    assert add() == world.size


def test_a_receive_may_be_posted_long_before_the_wait(world, last, one_second_group):
    if world.rank == last:
        received = torch.zeros(3)
        work = dist.irecv(received, 0, group=one_second_group)
        time.sleep(1.5)
        add()
        work.wait()
        assert received.tolist() == [7.0] * 3
    else:
        add()
        if world.rank == 0:
            dist.send(torch.full((3,), 7.0), last, group=one_second_group)


def test_a_receive_from_a_rank_that_has_destroyed_the_group_raises(world, last):
    with group_of_all(world, ended_by=0) as group:
        if world.rank == 0:
            dist.send(torch.ones(1), last, group=group)
            dist.destroy_process_group(group)
        elif world.rank == last:
            time.sleep(0.5)
            dist.recv(torch.zeros(1), 0, group=group)  # sent before the group was destroyed
            fails(
                lambda: dist.recv(torch.zeros(1), 0, group=group),
                rf"^recv: rank 0 of {world.size} ended the group without sending the message",
            )


def test_a_receive_canceled_by_destroying_its_group_fails(world, monkeypatch):
    monkeypatch.setattr(message_thread, "_CLOSE_SEC", 60)  # for a message in flight
    group = dist.new_group()
    work = dist.irecv(torch.zeros(3), (world.rank + 1) % world.size, group=group)
    began = time.monotonic()
    dist.destroy_process_group(group)
    assert time.monotonic() - began < SOON_SEC
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(CollectiveError, match=r"^the group ended while waiting for a message"):
        work.wait()


def test_new_group_times_out_if_a_rank_does_not_arrive(world, last):
    """The rank that arrives late gets the same error, and the next group can be created."""
    if world.rank == last:
        add()
    fails(
        lambda: dist.new_group(timeout=SHORT),
        rf"^timed out after 1 s in new_group: waiting for rank {last} of {world.size}$",
        after_sec=0.9 if world.rank != last else 0.0,
    )
    if world.rank != last:
        add()
    with group_of_all(world) as group:
        assert add(group) == world.size


def test_a_rank_that_arrives_after_the_others_timed_out_gets_an_error(world, last):
    """The calls time out side by side, each in a group and a thread of its own."""
    # On a busy machine a rank may learn it from another, which has timed out before.
    named = rf"timed out after 1 s in \w+ #2: waiting for rank {last} of {world.size}; set a"
    too_late = rf"^rank {last} of {world.size} arrived too late in \w+ #2: the others timed out"

    def time_out(call, group):
        fails(lambda: call(group=group), named, after_sec=0.9)
        fails(lambda: call(group=group), "this process group failed before: .* rank")

    def parts():
        return [torch.zeros(9) for _ in range(world.size)]

    calls = (
        *(partial(dist.all_reduce, torch.ones(length)) for length in (3, 300_000)),
        lambda group: dist.all_gather(parts(), torch.ones(9), group=group),
        lambda group: dist.all_to_all(parts(), parts(), group=group),
        lambda group: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(),
        dist.barrier,
    )
    groups = [dist.new_group(timeout=SHORT) for _ in calls]
    for call, group in zip(calls, groups, strict=True):
        call(group=group)
    if world.rank == last:
        add()  # after the others have timed out
        for call, group in zip(calls, groups, strict=True):
            fails(partial(call, group=group), too_late)
    else:
        with ThreadPoolExecutor(len(groups)) as threads:
            list(threads.map(time_out, calls, groups))  # raises their errors
        add()
    assert add() == world.size
    for group in groups:
        dist.destroy_process_group(group)


def test_a_broadcast_does_not_hide_that_the_others_have_timed_out(world, last):
    """Its root is done before the last rank comes, which then must not wait in a blocking call."""
    group = dist.new_group(timeout=SHORT)
    dist.barrier(group)
    if world.rank == last:
        add()  # after the others have timed out
    dist.broadcast(torch.ones(3), 0, group)
    error = (
        rf"^rank {last} of {world.size} arrived too late" if world.rank == last else "^timed out"
    )
    fails(lambda: dist.all_reduce(torch.ones(300_000), group=group), error)
    if world.rank != last:
        add()
    dist.destroy_process_group(group)
    assert add() == world.size


def test_waiting_for_a_tcp_store_key_does_not_block_a_collective(world, last):
    """The store's client serves one thread at a time, so the collective must not need it."""
    dist.destroy_process_group()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = world.comm.bcast(probe.getsockname()[1])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    numbers = {"rank": world.rank, "world_size": world.size, "timeout": LONG}
    dist.init_process_group("kaitian", init_method="env://", **numbers)
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(300_000)  # so large that it cannot complete without rank 0's thread
    if world.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert store.get("hello") == b"x"  # set after the collective
        work.wait()
    else:
        time.sleep(1.5)  # by then rank 0 has recorded that it waits
        dist.all_reduce(tensor)
        if world.rank == last:
            store.set("hello", "x")
    assert tensor[0].item() == world.size
    dist.destroy_process_group()
    dist.init_process_group("kaitian", init_method="mpi://")
