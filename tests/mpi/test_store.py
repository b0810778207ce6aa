import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from kaitian_mpi.mpi.store import MPIStore

pytestmark = pytest.mark.sizes(1, 3)


@pytest.fixture
def store(world):
    store = MPIStore(world.comm, timedelta(seconds=20))
    yield store
    store.close()


def test_every_operation(store, world):
    own, ranks = f"key{world.rank}", range(world.size)
    if world.rank == world.size - 1:
        time.sleep(0.2)  # the others' `get` waits for its keys
    store.set(own, f"value {world.rank}")
    assert [store.get(f"key{rank}") for rank in ranks] == [b"value %d" % rank for rank in ranks]
    world.comm.Barrier()
    assert store.num_keys() == world.size
    assert sorted(store.list_keys()) == [f"key{rank}" for rank in ranks]
    world.comm.Barrier()
    store.multi_set([own, f"{own}b"], ["1", b"\x00binary\xff"])
    with pytest.raises(ValueError, match="shorter"):
        store.multi_set(["c", "d"], ["1"])
    store.append(own, "+")
    assert store.multi_get([own, f"{own}b"]) == [b"1+", b"\x00binary\xff"]
    assert store.check([own])
    assert not store.check(["nothing", own])
    assert store.delete_key(own)
    assert not store.delete_key(own)
    store.add("count", world.rank + 1)
    winner = store.compare_set("winner", "", str(world.rank))
    assert len(set(world.comm.allgather(winner))) == 1
    assert store.add("count", 0) == world.size * (world.size + 1) // 2
    assert store.compare_set("winner", "nobody", "x") == winner


@pytest.mark.parametrize("caller", ["first", "last"])
def test_a_failed_request_raises_in_its_caller(store, world, caller):
    if world.rank == (0 if caller == "first" else world.size - 1):
        store.set("text", "abc")
        with pytest.raises(dist.DistStoreError, match="key text: its value b'abc' is not a number"):
            store.add("text", 1)
        with pytest.raises(TypeError, match="a store holds str or bytes, not int"):
            store.set("number", 5)
    world.comm.Barrier()
    store.set(f"after/{world.rank}", "1")
    assert store.get(f"after/{world.size - 1}") == b"1"


def test_views_share_a_server_but_not_keys_or_a_timeout(store, world):
    one, two = store.view("one"), store.view("two", timedelta(seconds=0.3))
    one.set(f"key{world.rank}", "1")
    one.wait([f"key{rank}" for rank in range(world.size)])
    assert one.num_keys() == world.size
    assert sorted(one.list_keys()) == [f"key{rank}" for rank in range(world.size)]
    assert two.num_keys() == 0
    with pytest.raises(dist.DistStoreError, match=r"store key key0: .* within 0\.3 s"):
        two.get("key0")
    with pytest.raises(dist.DistStoreError, match="nobody"):
        store.wait(["nobody"], timedelta(seconds=0.3))
    world.comm.Barrier()


def test_remaining_ranks_know_which_ranks_have_departed(store, world):
    assert store.departed() == []
    world.comm.Barrier()
    leaves = world.rank == world.size - 1 > 0
    if leaves:
        store.close()
    world.comm.Barrier()
    if not leaves:
        departed = store.departed()
        while world.size > 1 and not departed:  # its message may be on the way
            departed = store.departed()
        assert (world.size - 1 in departed) == (world.size > 1)
        assert world.rank not in departed


def test_threads_that_wait_for_large_values_do_not_block_the_store(store, world):
    large = bytes(range(256)) * 4_000
    keys = [f"{world.rank}/{number}" for number in range(8)]
    with ThreadPoolExecutor(len(keys)) as threads:
        found = threads.map(store.get, keys)
        for key in keys:
            store.set(key, large + key.encode())
        assert list(found) == [large + key.encode() for key in keys]


def test_torch_distributed_can_be_initialized_many_times(world):
    """The default group is destroyed and, at the end, created again for the other tests."""
    dist.destroy_process_group()
    for count in range(20):
        dist.init_process_group("kaitian", init_method="mpi://")
        tensor = torch.full((3,), float(count))
        dist.all_reduce(tensor)
        assert tensor.tolist() == [count * world.size] * 3
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("kaitian-store") == (1 if world.rank == 0 else 0)
        if count < 19:
            dist.destroy_process_group()
