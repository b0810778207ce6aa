"""The parts of the MPI layer that need no MPI."""

import pytest

from kaitian_mpi.mpi.exchange import join_errors
from kaitian_mpi.mpi.topology import RankInfo, may_group_by_host, plan_groups
from kaitian_mpi.runtime.launcher import (
    Launch,
    different_mpi,
    find_launch,
    prepare_environment,
    read_launch,
    unlaunched,
)

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "1,4,1",
}
# As in the script of a batch job.
BATCH = {name: value for name, value in SRUN.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
INTERACTIVE = {**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (SRUN, Launch(5, 6, 0, 1)),
        ({**SRUN, "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, Launch(5, 6, 0, 2)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": ""}, None),
        ({**SRUN, **OPEN_MPI}, Launch(5, 8, 1, 4)),  # its daemon on another node is srun's
        (BATCH, None),
        (INTERACTIVE, None),
        (OPEN_MPI, Launch(5, 8, 1, 4)),
        (MPICH, Launch(2, 3, 0, 1)),
        ({**MPICH, **OPEN_MPI}, Launch(5, 8, 1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "5"}, None),
    ],
)
def test_placement_is_read_from_the_environment_of_what_a_launcher_started(environ, expected):
    assert read_launch(environ) == (expected or Launch(0, 1, 0, 1))
    assert find_launch(environ) == expected


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, ""),
        (BATCH, "a Slurm job of 6 tasks"),
        (INTERACTIVE, "a Slurm job of 6 tasks"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, "a Slurm job of 2 nodes"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_HET_SIZE": "2"}, "of 2 components"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}, ""),
        ({**BATCH, **OPEN_MPI}, ""),
        ({**BATCH, "PMIX_RANK": "0"}, ""),
        ({**BATCH, **SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ""),  # srun -n 1
        ({"K_MPI_JOB_ROLE": "launcher"}, "the launcher of an MPIJob"),
        ({"K_MPI_JOB_ROLE": "worker"}, ""),
    ],
)
def test_a_single_rank_in_a_larger_allocation_is_found(environ, found):
    fault = unlaunched(environ)
    assert (fault is not None) == bool(found)
    if fault:
        assert found in fault[0]
        assert "mpirun" in fault[1]


@pytest.mark.parametrize(
    ("local_size", "world_size", "cores", "yields", "threads"),
    [
        *((1, 1, 8, False, "8"), (4, 4, 8, False, "2"), (5, 5, 8, True, "1"), (4, 4, 2, True, "1")),
        (2, 4, 2, True, "1"),
    ],
)
def test_ranks_yield_without_two_cores_each_and_use_tcp_only_between_hosts(
    local_size, world_size, cores, yields, threads
):
    environ: dict[str, str] = {}
    prepare_environment(environ, Launch(0, world_size, 0, local_size), cores)
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
    prepare_environment(environ, Launch(0, 4, 0, 4), 2)
    assert environ == theirs  # what the user has set is kept


@pytest.mark.parametrize(
    ("kinds", "nodes", "expected"),
    [
        ("a", None, [("a", (0,), None)]),
        ("aa", None, [("a", (0, 1), None)]),
        ("bab", None, [("b", (0, 2), None), ("a", (1,), None)]),
        (
            *("abaab", [0, 0, 0, 3, 3]),
            [("a", (0, 2), 0), ("b", (1,), 0), ("a", (3,), 3), ("b", (4,), 3)],
        ),
    ],
)
def test_ranks_are_grouped_by_kind_or_by_kind_and_host(kinds, nodes, expected):
    groups = plan_groups(kinds, nodes)
    assert [(group.kind, group.ranks, group.node) for group in groups] == expected
    assert [group.leader for group in groups] == [ranks[0] for _, ranks, _ in expected]


def test_groups_by_host_are_an_alternative_only_where_they_differ_in_use():
    for kinds, nodes, may in (
        ("aab", (0, 0, 0), False),  # one host
        ("aaaa", (0, 0, 1, 1), False),  # one kind
        ("aabb", (0, 0, 1, 1), False),  # each kind on one host
        ("abab", (0, 0, 1, 1), False),  # no host has two ranks of a kind
        ("aaab", (0, 0, 1, 1), True),
        ("aabaab", (0, 0, 0, 1, 1, 1), True),
    ):
        assert may_group_by_host(kinds, nodes) == may


def test_ranks_and_their_errors_are_described_in_one_line():
    for kind, device, name in (
        ("cuda", "cuda:0", "rank 2 (node-b, cuda:0)"),
        ("cpu", "cpu", "rank 2 (node-b, cpu)"),
        ("mlu", "cpu", "rank 2 (node-b, cpu, mlu)"),  # emulated
        ("rocm", "cuda:1", "rank 2 (node-b, cuda:1, rocm)"),
    ):
        assert str(RankInfo(2, 0, "node-b", kind, device, "a device", 2**30, "2.13")) == name
    assert join_errors(["x", "x"]) == "x"
    assert join_errors(["", "x"]) == "rank 1: x"
    assert join_errors(["y", "x", "", "x"]) == "rank 0: y; ranks 1, 3: x"
    for library, flag in (
        ("Open MPI", "give srun --mpi=pmix ("),
        ("MPICH 5.0.1", "give srun --mpi=pmi2 ("),
        ("Intel MPI", "give srun --mpi=pmi2 ("),
        ("MVAPICH", "--mpi=pmix or --mpi=pmi2"),
    ):
        assert different_mpi(6, 6, library, by_srun=True) is None
        found, advice = different_mpi(6, 1, library, by_srun=True)
        assert "srun started 6 tasks, but MPI sees 1" in found
        assert flag in advice
