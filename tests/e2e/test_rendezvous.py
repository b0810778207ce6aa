"""Rendezvous: every init_method of torch, beside gloo, and without an open port."""

import json
import os
import socket
import time
from collections import Counter

import pytest
from choices import by_default
from jobs import PLANTED, PYTHON, SOON_SEC, finish, forked, run_alone, start

SCRIPT = str(PLANTED / "planted_rendezvous.py")


@pytest.fixture
def planted(mpirun):
    """Run a function of planted_rendezvous.py on three ranks."""
    return lambda name, *words, **options: mpirun(3, PYTHON, SCRIPT, name, *words, **options)


def free_ports(count):
    """Return ports that are free now, as strings."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def test_every_init_method_in_one_process_and_no_port_is_opened(planted, tmp_path):
    ended = planted("methods", tmp_path, *free_ports(8))
    lines = ended.out.splitlines()
    for rank, ports, with_tcp_store in map(json.loads, sorted(lines[:3])):
        assert ports == []
        # An open port is found where there is one, if /proc lists a process's sockets.
        assert with_tcp_store or rank or not os.path.exists("/proc/net")
    once = ["env://", "no arguments", "rank and world size", "mpi://"]
    both = ["mpi://", "file:/", "tcp://", "FileStore", "TCPStore"]
    assert lines[3:] == once + both + [f"{name} reversed" for name in both]
    assert ended.err == ""


def test_one_rank_with_a_hash_store(tmp_path):
    assert run_alone(PYTHON, SCRIPT, "alone", cwd=tmp_path).out == "HashStore\n"


def test_a_wrong_rank_or_world_size_raises_on_every_rank_and_can_be_corrected(planted, tmp_path):
    """By a group beside one of gloo, in either order."""
    ended = planted("wrong_ranks_and_sizes", tmp_path)
    advice = "but mpirun started 3 ranks; pass world_size=3, or omit it with"
    counts = Counter(ended.out.splitlines())
    assert counts == {
        f'UserError: the world size is 4, {advice} init_method="mpi://"': 6,
        f'UserError: the world size is 2, {advice} init_method="mpi://"': 3,
        **{
            f"AgreedError: the processes gave ranks {ranks} (in MPI's order), but each of 0 to 2 "
            "must occur once; give every process its own rank": 3
            for ranks in ("[0, 1, 1]", "[1, 2, 3]")
        },
        "kaitian, then gloo": 1,
        "gloo, then kaitian": 1,
    }
    assert ended.seconds < SOON_SEC


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("too_few", "the world size is 2, but mpirun started 3"),
        ("subgroup_first", "the first group over kaitian has 2 of 3 ranks"),
    ],
)
def test_ranks_that_never_arrive_are_not_waited_for(planted, tmp_path, name, found):
    ended = planted(name, *free_ports(1) if name == "too_few" else [tmp_path], code=1)
    assert f"UserError: {found}" in ended.err
    assert ended.seconds < SOON_SEC


@pytest.mark.parametrize("method", by_default(["mpi://", "env://"], ["env://"]))
def test_a_launcher_other_than_mpirun_is_rejected(tmp_path, method):
    """Each process would be a job of its own, and train alone."""
    port, command = free_ports(1)[0], forked([PYTHON, SCRIPT, "plain", method])
    started_at = time.time()
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        start(*command, cwd=tmp_path, env={"RANK": str(rank), **place}) for rank in range(2)
    ]
    for ended in [finish(process, started_at, code=2) for process in processes]:
        assert "error: the world size is 2, but MPI has only this rank" in ended.err
        assert "Traceback" not in ended.err
        assert "mpirun -np 2" in ended.err
        assert ended.seconds < SOON_SEC
