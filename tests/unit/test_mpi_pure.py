"""The parts of the MPI layer that need no MPI."""

import pytest

from kaitian_mpi.mpi.exchange import join_errors
from kaitian_mpi.mpi.topology import Group, RankInfo, plan_groups
from kaitian_mpi.runtime.launcher import Launch, prepare_environment, read_launch

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch(0, 1, 0, 1)),
        (OPEN_MPI, Launch(5, 8, 1, 4)),
        (MPICH, Launch(2, 3, 0, 1)),
        ({**MPICH, **OPEN_MPI}, Launch(5, 8, 1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "5"}, Launch(0, 1, 0, 1)),
    ],
)
def test_placement_is_read_from_the_environment(environ, expected):
    assert read_launch(environ) == expected


@pytest.mark.parametrize(
    ("local_size", "cores", "yields", "threads"),
    [(1, 8, False, "8"), (4, 8, False, "2"), (5, 8, True, "1"), (4, 2, True, "1")],
)
def test_idle_ranks_yield_where_there_are_fewer_than_two_cores_a_rank(
    local_size, cores, yields, threads
):
    environ: dict[str, str] = {}
    prepare_environment(environ, Launch(0, local_size, 0, local_size), cores)
    assert ("OMPI_MCA_mpi_yield_when_idle" in environ) == yields
    assert environ["OMP_NUM_THREADS"] == threads


def test_variables_set_by_the_user_are_kept():
    theirs = {
        "OMP_NUM_THREADS": "7",
        "OMPI_MCA_mpi_yield_when_idle": "0",
        "OMPI_MCA_btl": "self,tcp",
    }
    environ = dict(theirs)
    prepare_environment(environ, Launch(0, 4, 0, 4), 2)
    assert environ == theirs


@pytest.mark.parametrize(("local_size", "without_tcp"), [(4, True), (2, False)])
def test_tcp_is_disabled_on_a_single_host(local_size, without_tcp):
    environ: dict[str, str] = {}
    prepare_environment(environ, Launch(0, 4, 0, local_size), 2)
    assert ("OMPI_MCA_btl" in environ) == without_tcp


@pytest.mark.parametrize("local_size", [4, 2])
def test_between_hosts_a_part_of_an_allreduce_is_sent_without_asking_first(local_size):
    environ: dict[str, str] = {}
    prepare_environment(environ, Launch(0, 4, 0, local_size), 2)
    limits = [environ.get(f"OMPI_MCA_btl_tcp_{name}") for name in ("eager_limit", "max_send_size")]
    if local_size == 4:
        assert limits == [None, None]
    else:
        assert min(map(int, limits)) > 256 << 10


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["cpu"], (Group("cpu", (0,)),)),
        (["cuda", "cuda"], (Group("cuda", (0, 1)),)),
        (
            ["mlu", "cuda", "mlu", "cpu"],
            (Group("mlu", (0, 2)), Group("cuda", (1,)), Group("cpu", (3,))),
        ),
    ],
)
def test_ranks_are_grouped_by_kind(kinds, expected):
    groups = plan_groups(kinds)
    assert groups == expected
    assert [group.leader for group in groups] == [group.ranks[0] for group in expected]


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        (["x", "x"], "x"),
        (["", "x"], "rank 1: x"),
        (["y", "x", "", "x"], "rank 0: y; ranks 1, 3: x"),
    ],
)
def test_errors_of_several_ranks_are_joined_into_one_line(faults, expected):
    assert join_errors(faults) == expected


@pytest.mark.parametrize(
    ("kind", "device", "name"),
    [
        ("cuda", "cuda:0", "rank 2 (node-b, cuda:0)"),
        ("cpu", "cpu", "rank 2 (node-b, cpu)"),
        ("mlu", "cpu", "rank 2 (node-b, cpu, mlu)"),  # emulated
        ("rocm", "cuda:1", "rank 2 (node-b, cuda:1, rocm)"),
    ],
)
def test_a_rank_is_described_by_number_host_device_and_kind(kind, device, name):
    assert str(RankInfo(2, 0, "node-b", kind, device, "a device", 2**30, "2.13")) == name
