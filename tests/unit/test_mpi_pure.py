"""The parts of the MPI layer that need no MPI."""

import gc
import socket
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from kaitian_mpi.distributed.creation import clear_store_barrier, store_barrier
from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.mpi.exchange import join_errors
from kaitian_mpi.mpi.topology import RankInfo, may_group_by_host, plan_groups
from kaitian_mpi.runtime import launcher, mpi_libraries, ulfm
from kaitian_mpi.runtime.polling import wait_request

BY_OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
BY_MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS": "6", "SLURM_PROCID": "5",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "1,4,1",
}  # fmt: skip
# As in the script of a batch job.
BATCH = {name: value for name, value in SRUN.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
INTERACTIVE = {**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}


def test_placement_is_read_from_the_environment_and_decides_on_waiting_and_tcp():
    for environ, expected in (
        ({}, None),
        (SRUN, launcher.Launch(5, 6, 0, 1)),
        (
            {**SRUN, "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
            launcher.Launch(5, 6, 0, 2),
        ),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": ""}, None),
        (
            {**SRUN, **BY_OPEN_MPI},
            launcher.Launch(5, 8, 1, 4),
        ),  # its daemon on another node is srun's
        (BATCH, None),
        (INTERACTIVE, None),
        (BY_OPEN_MPI, launcher.Launch(5, 8, 1, 4)),
        (BY_MPICH, launcher.Launch(2, 3, 0, 1)),
        ({**BY_MPICH, **BY_OPEN_MPI}, launcher.Launch(5, 8, 1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "5"}, None),
    ):
        assert launcher.read_launch(environ) == (expected or launcher.Launch(0, 1, 0, 1))
        assert launcher.find_launch(environ) == expected
    for environ, library in (
        ({}, ""),
        (BATCH, "a Slurm job of 6 tasks"),
        (INTERACTIVE, "a Slurm job of 6 tasks"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, "a Slurm job of 2 nodes"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_HET_SIZE": "2"}, "of 2 components"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}, ""),
        ({**BATCH, **BY_OPEN_MPI}, ""),
        ({**BATCH, "PMIX_RANK": "0"}, ""),
        ({**BATCH, **SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ""),  # srun -n 1
        ({"K_MPI_JOB_ROLE": "launcher"}, "the launcher of an MPIJob"),
        ({"K_MPI_JOB_ROLE": "worker"}, ""),
    ):
        fault = launcher.unlaunched(environ)
        assert (fault is not None) == bool(library)
        if fault:
            assert library in fault[0]
            assert "mpirun" in fault[1]
    for local_size, world_size, cores, yields, threads in (
        *((1, 1, 8, False, "8"), (4, 4, 8, False, "2"), (5, 5, 8, True, "1"), (4, 4, 2, True, "1")),
        (2, 4, 2, True, "1"),
    ):
        environ: dict[str, str] = {}
        launcher.prepare_environment(environ, launcher.Launch(0, world_size, 0, local_size), cores)
        assert ("OMPI_MCA_mpi_yield_when_idle" in environ) == yields
        assert environ["OMP_NUM_THREADS"] == threads
        on_one_host = local_size == world_size
        assert ("OMPI_MCA_btl" in environ) == on_one_host
        for name in ("eager_limit", "max_send_size"):  # longer messages are sent without asking
            limit = environ.get(f"OMPI_MCA_btl_tcp_{name}")
            assert limit is None if on_one_host else int(limit) > 256 << 10
        theirs = {"OMP_NUM_THREADS": "7", "OMPI_MCA_mpi_yield_when_idle": "0"}
        theirs |= {"OMPI_MCA_btl": "self,tcp"}
        environ = dict(theirs)
        launcher.prepare_environment(environ, launcher.Launch(0, 4, 0, 4), 2)
        assert environ == theirs  # what the user has set is kept


def test_ranks_are_grouped_by_kind_or_by_host_too_and_described_in_one_line():
    for kinds, nodes, expected in (
        ("a", None, [("a", (0,), None)]),
        ("aa", None, [("a", (0, 1), None)]),
        ("bab", None, [("b", (0, 2), None), ("a", (1,), None)]),
        (
            *("abaab", [0, 0, 0, 3, 3]),
            [("a", (0, 2), 0), ("b", (1,), 0), ("a", (3,), 3), ("b", (4,), 3)],
        ),
    ):
        groups = plan_groups(kinds, nodes)
        assert [(group.kind, group.ranks, group.node) for group in groups] == expected
        assert [group.leader for group in groups] == [ranks[0] for _, ranks, _ in expected]
    for kinds, nodes, may in (
        ("aab", (0, 0, 0), False),  # one host
        ("aaaa", (0, 0, 1, 1), False),  # one kind
        ("aabb", (0, 0, 1, 1), False),  # each kind on one host
        ("abab", (0, 0, 1, 1), False),  # no host has two ranks of a kind
        ("aaab", (0, 0, 1, 1), True),
        ("aabaab", (0, 0, 0, 1, 1, 1), True),
    ):
        assert may_group_by_host(kinds, nodes) == may
    for kind, device, name in (
        ("cuda", "cuda:0", "rank 2 (node-b, cuda:0)"),
        ("cpu", "cpu", "rank 2 (node-b, cpu)"),
        ("mlu", "cpu", "rank 2 (node-b, cpu, mlu)"),  # emulated
        ("rocm", "cuda:1", "rank 2 (node-b, cuda:1, rocm)"),
    ):
        assert str(RankInfo(2, 0, "node-b", kind, device, "a device", 2**30, "2.13")) == name
    assert (join_errors(["x", "x"]), join_errors(["", "x"])) == ("x", "rank 1: x")
    assert join_errors(["y", "x", "", "x"]) == "rank 0: y; ranks 1, 3: x"
    for library, flag in (
        ("Open MPI", "give srun --mpi=pmix ("),
        ("MPICH 5.0.1", "give srun --mpi=pmi2 ("),
        ("Intel MPI", "give srun --mpi=pmi2 ("),
        ("MVAPICH", "--mpi=pmix or --mpi=pmi2"),
    ):
        assert launcher.different_mpi(6, 6, library, by_srun=True) is None
        problem, advice = launcher.different_mpi(6, 1, library, by_srun=True)
        assert "srun started 6 tasks, but MPI sees 1" in problem
        assert flag in advice


RANKS = {
    mpi_libraries.OPEN_MPI: dict.fromkeys(mpi_libraries.OPEN_MPI.rank_variables, "1"),
    mpi_libraries.MPICH: dict.fromkeys(mpi_libraries.MPICH.rank_variables, "1"),
}


@pytest.mark.parametrize("library", [mpi_libraries.OPEN_MPI, mpi_libraries.MPICH])
def test_a_launcher_is_known_by_the_variables_of_its_ranks(library):
    assert mpi_libraries.launched_by(RANKS[library]) is library
    assert mpi_libraries.launched_by({}) is None
    assert (
        mpi_libraries.launched_by({**RANKS[mpi_libraries.OPEN_MPI], **RANKS[mpi_libraries.MPICH]})
        is mpi_libraries.OPEN_MPI
    )
    for name in library.rank_variables:
        assert mpi_libraries.launched_by({**RANKS[library], name: ""}) is None


def test_a_job_under_mpich_has_no_fault_tolerance_whatever_the_environment_says():
    asked = {"OMPI_MCA_mpi_ft_enable": "1"}
    assert mpi_libraries.survival_requested({**asked, **RANKS[mpi_libraries.OPEN_MPI]})
    assert mpi_libraries.survival_requested(asked)
    assert not mpi_libraries.survival_requested({**asked, **RANKS[mpi_libraries.MPICH]})
    assert not mpi_libraries.survival_requested(RANKS[mpi_libraries.OPEN_MPI])
    assert mpi_libraries.survival_advice("Open MPI 5.0.11").startswith("give mpirun --with-ft ulfm")
    for library in ("Open MPI 4.1.4", "MPICH 5.0.2", "Intel MPI 2021.13"):
        advice = f"{library} cannot survive it; kaitian-supervise starts the job again"
        assert mpi_libraries.survival_advice(library).startswith(advice)
    environ = dict(RANKS[mpi_libraries.MPICH])  # which library will be loaded is not known yet
    launcher.prepare_environment(environ, launcher.Launch(0, 4, 0, 4), 2)
    assert environ["OMPI_MCA_btl"] == "^tcp,ofi"


def test_nothing_is_written_to_a_file_that_is_not_the_launchers(tmp_path):
    ours, theirs = socket.socketpair()
    with ours, theirs, (tmp_path / "file").open("w+b") as file:
        theirs.setblocking(False)
        for number in (ours.fileno(), file.fileno(), 9999):
            mpi_libraries.report_to_launcher({**RANKS[mpi_libraries.MPICH], "PMI_FD": str(number)})
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        assert (tmp_path / "file").read_bytes() == b""


class Failing:
    def Test(self):  # noqa: N802, MPI's name
        raise RuntimeError("a rank is lost")


def test_a_failed_request_is_kept_for_mpi_may_write_to_its_buffers():
    request = Failing()
    reference = weakref.ref(request)
    with pytest.raises(RuntimeError, match="a rank is lost"):
        wait_request(request)
    del request
    gc.collect()
    assert reference() is not None


def arrive(store, size, after, departed=lambda missing: []):
    """Let each rank arrive after so many seconds; return each rank's result or error."""
    outcomes = {}

    def run(rank, seconds):
        time.sleep(seconds)
        group = {"store": store, "group_rank": rank, "group_size": size}
        options = SimpleNamespace(**group, timeout=timedelta(seconds=30))
        try:
            outcomes[rank] = store_barrier(options, "new_group", departed)
        except CollectiveError as error:
            outcomes[rank] = str(error)

    threads = [threading.Thread(target=run, args=item) for item in after.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_buffers_that_are_kept_are_not_freed_at_the_end_of_the_interpreter():
    """Where a script imports mpi4py first, MPI_Finalize still receives, and comes after it."""
    code = """
import os
from kaitian_mpi.runtime.polling import keep_alive

class Buffer:
    def __del__(self):
        os.write(2, b"freed")

keep_alive(Buffer())
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=60, check=True
    )
    assert ended.stderr == b""


def test_all_ranks_get_the_same_new_name_and_none_waits_for_one_that_has_left():
    store, names = dist.HashStore(), set()
    for _ in range(3):
        outcomes = arrive(store, 3, {0: 0.0, 1: 0.1, 2: 0.0})
        names |= set(outcomes.values())
        for rank in range(3):
            clear_store_barrier(store, rank)
        assert store.num_keys() == 0
    assert len(names) == 3
    outcomes = arrive(
        dist.HashStore(), 3, {0: 0.0, 2: 0.0}, departed=lambda missing: [r for r in missing if r]
    )
    message = "new_group: rank 1 of 3 left the job without calling it; every rank must call it"
    assert outcomes == {0: message, 2: message}  # not that of a timeout


def agreeing_comm(rank, *outcomes):
    """Return a communicator of four ranks whose agreements come out so, and what it is asked."""
    asked, left = [], list(outcomes)

    def agree(value):
        asked.append(("agree", value[0]))
        value[0] = left.pop(0)
        return SimpleNamespace(Test=lambda: True)

    def send(content, rank, tag):
        asked.append(("send", rank))
        return SimpleNamespace(Free=lambda: None)

    def receive(buffer, rank, tag):
        return SimpleNamespace(Test=lambda: asked.append(("received", rank)) or True)

    return SimpleNamespace(rank=rank, size=4, Iagree=agree, Isend=send, Irecv=receive), asked


@pytest.mark.parametrize(
    ("ok", "outcomes", "expected"),
    [
        (True, [3], True),
        (True, [1], False),
        (False, [1], False),
        # A rank's value was damaged: the lowest bits of an address are 0.
        (True, [0, 0, 3], True),
        (True, [0, 1], False),
    ],
)
def test_ranks_agree_again_on_values_that_mpi_has_damaged(ok, outcomes, expected):
    comm, asked = agreeing_comm(1, *outcomes)
    assert ulfm.agree(comm, ok) is expected
    assert asked == [("agree", 3 if ok else 1), ("send", 0)] * len(outcomes)


def test_the_rank_that_decides_an_agreement_is_the_last_to_enter():
    comm, asked = agreeing_comm(0, 3)
    assert ulfm.agree(comm, True)
    assert asked == [("received", 1), ("received", 2), ("agree", 3)]


def test_a_rank_passes_on_that_those_below_it_have_entered_an_agreement():
    comm, asked = agreeing_comm(2, 3)
    assert ulfm.agree(comm, True)
    assert asked == [("agree", 3), ("received", 3), ("send", 0)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 1000])
def test_every_rank_but_the_first_has_one_parent_in_an_agreement(size):
    children = {rank: list(ulfm._children(rank, size)) for rank in range(size)}
    assert sorted(rank for below in children.values() for rank in below) == list(range(1, size))
    assert all(ulfm._parent(child) == rank for rank in children for child in children[rank])
    assert max(map(len, children.values())) <= 10


def test_an_agreement_that_only_this_rank_cannot_read_ends_the_job():
    comm, _ = agreeing_comm(2, 0x15FBCAF8)
    with pytest.raises(RuntimeError, match="MPI has damaged the outcome of an agreement"):
        ulfm.agree(comm, True)
