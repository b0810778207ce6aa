"""What concerns communication between hosts and needs no MPI."""

import pytest

from kaitian_mpi.distributed.interfaces import found_interfaces, limit_to
from kaitian_mpi.distributed.network.allreduce import Route, group_by_host
from kaitian_mpi.distributed.network.link import (
    LONG_BYTES,
    MPI_ROUTE,
    SHORT_BYTES,
    Choice,
    choose,
    routes,
)
from kaitian_mpi.errors import UserError

PAIRWISE, RING = Route("pairwise"), Route("ring")


def test_ranks_are_grouped_by_host():
    assert group_by_host([4, 7, 4, 4, 7]) == ((0, 2, 3), (1, 4))


def test_all_lanes_are_tried_if_there_are_several():
    assert routes(["ring"], 1) == [MPI_ROUTE, RING]
    assert routes(["ring"], 8) == [MPI_ROUTE, RING, Route("ring", 8)]


@pytest.mark.parametrize(
    ("short", "long", "chosen", "min_bytes"),
    [
        ((2, 1, 3), (9, 4, 3), RING, LONG_BYTES // 2),
        ((2, 1, 1), (9, 4, 3), RING, SHORT_BYTES),
        ((2, 3, 3), (9, 4, 5), PAIRWISE, LONG_BYTES // 2),
        ((2, 1, 1), (3, 4, 5), MPI_ROUTE, SHORT_BYTES),
        ((2, 1, 1), (9, 10, 11), PAIRWISE, SHORT_BYTES),  # MPI's is not clearly faster
    ],
)
def test_the_fastest_route_is_chosen_from_the_length_on_that_it_pays(
    short, long, chosen, min_bytes
):
    names = MPI_ROUTE, PAIRWISE, RING
    long_seconds = dict(zip(names, long, strict=True))
    found = choose(dict(zip(names, short, strict=True)), long_seconds)
    assert found == (chosen, min_bytes, long_seconds)


def test_a_choice_says_what_was_measured():
    measured = Choice(Route("ring", 2), seconds={MPI_ROUTE: 0.0413, Route("ring", 2): 0.023})
    expected = "ring in 2 lanes (measured, 2 MB: mpi 41.3 ms, ring in 2 lanes 23.0 ms)"
    assert measured.describe() == expected
    assert Choice(RING).describe() == "ring"


def test_interfaces_are_set_for_mpi_and_vendors_libraries():
    environ = {"OMPI_MCA_btl_tcp_if_include": "lo", "PATH": "/bin"}
    limit_to(" eth0, eth1", environ, ["eth0", "eth1", "docker0"])
    assert environ == {
        "PATH": "/bin",
        "OMPI_MCA_btl_tcp_if_include": "eth0,eth1",
        "GLOO_SOCKET_IFNAME": "eth0,eth1",
        "NCCL_SOCKET_IFNAME": "=eth0,eth1",
        "HCCL_SOCKET_IFNAME": "=eth0,eth1",
        "FI_TCP_IFACE": "eth0",
        "FI_SOCKETS_IFACE": "eth0",
    }


def test_without_interfaces_nothing_is_set():
    environ: dict[str, str] = {}
    limit_to("", environ, ["eth0"])
    assert not environ


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("eth0,eth7,", "no interface eth7 is up on .* choose from docker0, eth0,"),
        ("lo", "no interface lo is up on "),
        (" , ", "' , ' names no interface; give names such as eth0"),
    ],
)
def test_interfaces_that_are_not_there_are_named(given, message):
    with pytest.raises(UserError, match=f"--network-interface: {message}"):
        limit_to(given, {}, ["eth0", "docker0"])


def test_the_loopback_interface_reaches_no_other_host():
    assert "lo" not in found_interfaces()
