"""Scripts for test_rendezvous.py: plain torch.distributed; the first argument names a function."""

import json
import os
import sys
import time

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
REVERSED = SIZE - 1 - RANK


class WatchMPI:
    """Records whether the settings that must precede MPI are made when mpi4py is imported."""

    settings_made = None

    def find_spec(self, name, *_):
        if name == "mpi4py.MPI":
            WatchMPI.settings_made = "OMP_NUM_THREADS" in os.environ


os.environ.pop("OMP_NUM_THREADS", None)
sys.meta_path.insert(0, WatchMPI())

import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402


def write_line(text):
    os.write(1, f"{text}\n".encode())  # in one call, so that ranks' lines do not mix


def assert_in_order(rank, group=None, size=SIZE):
    """Check a group's collectives, and that its ranks are numbered as torch numbers them."""
    assert (dist.get_rank(group), dist.get_world_size(group)) == (rank, size)
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == size * (size + 1) / 2
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, group=group, group_src=0)
    assert tensor.item() == 0
    parts = [torch.empty(1) for _ in range(size)]
    dist.all_gather(parts, torch.tensor([float(rank)]), group=group)
    assert [part.item() for part in parts] == list(range(size))
    dist.barrier(group=group)


def assert_works(rank):
    assert_in_order(rank)
    members = sorted({0, SIZE - 1})
    ends = dist.new_group(members)
    if rank in members:
        assert_in_order(members.index(rank), ends, len(members))
    assert_in_order(rank, dist.new_group())


def end(name):
    dist.destroy_process_group()
    if RANK == 0:
        write_line(name)


def session(name, rank, /, **options):
    dist.init_process_group("kaitian", **options)
    assert dist.get_backend() == "kaitian"
    assert_works(rank)
    end(name)


def set_environment(rank, size, port):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def methods(folder, *ports):
    """Every init_method, one after the other, in MPI's order of ranks and in reverse."""
    ports = list(ports)
    tell_open_ports(ports.pop())
    set_environment(RANK, SIZE, ports.pop())
    session("env://", RANK, init_method="env://")
    set_environment(REVERSED, SIZE, ports.pop())
    session("no arguments", REVERSED)
    set_environment(RANK, SIZE, ports.pop())
    session("rank and world size", RANK, rank=RANK, world_size=SIZE)
    session("mpi://", RANK, init_method="mpi://")
    for order, rank in (("", RANK), (" reversed", REVERSED)):
        numbers = {"rank": rank, "world_size": SIZE}
        for method in ("mpi://", f"file://{folder}/meet{order}", f"tcp://127.0.0.1:{ports.pop()}"):
            session(f"{method[:6]}{order}", rank, init_method=method, **numbers)
        store = dist.FileStore(f"{folder}/store{order}", SIZE)
        session(f"FileStore{order}", rank, store=store, **numbers)
        store = dist.TCPStore("127.0.0.1", int(ports.pop()), SIZE, is_master=RANK == 0)
        session(f"TCPStore{order}", rank, store=store, **numbers)


def alone():
    """One rank, without mpirun, with a store that no other process can reach."""
    session("HashStore", 0, store=dist.HashStore(), rank=0, world_size=1)


def beside_gloo(folder):
    """Groups of one backend beside a default group of the other."""
    dist.init_process_group("cpu:kaitian", init_method="mpi://")
    assert_works(RANK)
    assert_in_order(RANK, dist.new_group(backend="gloo"))
    assert_in_order(RANK, init_device_mesh("cpu", (SIZE,)).get_group())
    mesh = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("a", "b"))
    assert_in_order(0, mesh.get_group("a"), 1)
    assert_in_order(RANK, mesh.get_group("b"))
    alone_group = dist.new_group([RANK], use_local_synchronization=True)
    assert_in_order(0, alone_group, 1)
    end("kaitian, then gloo")

    meeting = f"file://{folder}/gloo"
    dist.init_process_group("gloo", init_method=meeting, rank=REVERSED, world_size=SIZE)
    whole = dist.new_group(backend="kaitian")
    assert dist.get_backend(whole) == "kaitian"
    assert_in_order(REVERSED, whole)
    pair = dist.new_group([0, 1], backend="kaitian")
    if REVERSED < 2:
        assert_in_order(REVERSED, pair, 2)
    assert_in_order(REVERSED)
    end("gloo, then kaitian")


def assert_rejected(**options):
    try:
        dist.init_process_group("kaitian", **options)
    except Exception as error:
        write_line(f"{type(error).__name__}: {error}")
    assert not dist.is_initialized()


def wrong_ranks_and_sizes(folder):
    """Each wrong call raises on every rank; right ones are possible afterwards."""
    assert_rejected(init_method="mpi://", world_size=SIZE + 1, rank=RANK)
    assert_rejected(init_method=f"file://{folder}/more", world_size=SIZE + 1, rank=RANK)
    assert "mpi4py.MPI" not in sys.modules
    assert_rejected(init_method=f"file://{folder}/less", world_size=SIZE - 1, rank=0)
    assert_rejected(init_method=f"file://{folder}/twice", world_size=SIZE, rank=min(RANK, 1))
    assert_rejected(init_method="mpi://", rank=RANK + 1)
    beside_gloo(folder)


def too_few(port):
    """All ranks but the last call init_process_group, as a smaller job."""
    if RANK == SIZE - 1:
        time.sleep(600)
    set_environment(RANK, SIZE - 1, port)
    dist.init_process_group("kaitian")


def subgroup_first(folder):
    """The first group over kaitian has some ranks only; torch does not call it on the others."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=RANK, world_size=SIZE)
    dist.new_group([0, 1], backend="kaitian")
    time.sleep(600)


def plain(method):
    """What torchrun runs: rank and world size come from the environment."""
    dist.init_process_group("kaitian", init_method=method)


def listening_sockets():
    """Name the sockets on which this process listens, by type and address."""
    found = psutil.Process().net_connections(kind="inet") if os.path.exists("/proc/net") else []
    waiting = [c for c in found if c.status == psutil.CONN_LISTEN or c.type.name == "SOCK_DGRAM"]
    return [f"{c.type.name} {c.laddr.ip}" for c in waiting]


def tell_open_ports(port):
    """Print which ports a job opens; and which with TCPStore, as proof that they are found."""
    dist.init_process_group("kaitian", init_method="mpi://")
    assert WatchMPI.settings_made
    assert_works(RANK)
    dist.all_reduce(torch.ones(1 << 20))
    request = dist.isend(torch.ones(3), (RANK + 1) % SIZE)
    dist.recv(torch.empty(3), (RANK - 1) % SIZE)
    request.wait()
    dist.all_gather_object([None] * SIZE, {"rank": RANK})
    own = listening_sockets()
    dist.barrier()
    dist.destroy_process_group()
    set_environment(RANK, SIZE, port)
    dist.init_process_group("kaitian", init_method="env://")
    write_line(json.dumps([RANK, own, listening_sockets()]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
