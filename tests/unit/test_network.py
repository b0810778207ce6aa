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


def test_routes_between_hosts_are_all_tried_and_said():
    assert group_by_host([4, 7, 4, 4, 7]) == ((0, 2, 3), (1, 4))
    lanes = Route("ring", 8)
    assert (routes(["ring"], 1), routes(["ring"], 8)) == (
        [MPI_ROUTE, RING],
        [MPI_ROUTE, RING, lanes],
    )
    measured = Choice(lanes, seconds={MPI_ROUTE: 0.0413, lanes: 0.023})
    expected = "ring in 8 lanes (measured, 2 MB: mpi 41.3 ms, ring in 8 lanes 23.0 ms)"
    assert (measured.describe(), Choice(RING).describe()) == (expected, "ring")


def test_interfaces_are_set_for_mpi_and_vendors_libraries_or_named_as_missing():
    assert "lo" not in found_interfaces()  # which reaches no other host
    environ = {"OMPI_MCA_btl_tcp_if_include": "lo", "PATH": "/bin"}
    limit_to(" eth0, eth1", environ, ["eth0", "eth1", "docker0"])
    assert environ == {
        **{"PATH": "/bin", "OMPI_MCA_btl_tcp_if_include": "eth0,eth1"},
        "GLOO_SOCKET_IFNAME": "eth0,eth1",
        **dict.fromkeys(("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"), "=eth0,eth1"),
        **dict.fromkeys(("FI_TCP_IFACE", "FI_SOCKETS_IFACE"), "eth0"),
    }
    environ = {}
    limit_to("", environ, ["eth0"])
    assert not environ
    for given, message in (
        ("eth0,eth7,", "no interface eth7 is up on .* choose from docker0, eth0,"),
        ("lo", "no interface lo is up on "),
        (" , ", "' , ' names no interface; give names such as eth0"),
    ):
        with pytest.raises(UserError, match=f"--network-interface: {message}"):
            limit_to(given, environ, ["eth0", "docker0"])
