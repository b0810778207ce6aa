"""What concerns communication and needs no MPI: routes, formats, chunks, and torch's releases."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from choices import by_default
from torch._C._distributed_c10d import AllgatherOptions

from kaitian_mpi.distributed.collectives import torch_releases as releases
from kaitian_mpi.distributed.collectives.across_groups import carried
from kaitian_mpi.distributed.interfaces import found_interfaces, limit_to
from kaitian_mpi.distributed.network import link
from kaitian_mpi.distributed.network.allreduce import Route, group_by_host
from kaitian_mpi.distributed.network.formats import FORMATS
from kaitian_mpi.distributed.relay import chunking
from kaitian_mpi.distributed.relay.relay import Slots
from kaitian_mpi.distributed.residual import Residuals
from kaitian_mpi.errors import UserError

PAIRWISE, RING = Route("pairwise"), Route("ring")


@pytest.mark.parametrize("lengths", [(5, 0, 7, 1, 40), (8, 8, 8, 8, 8), (0, 0, 0, 0, 3)])
def test_a_groups_members_carry_their_own_parts_and_equal_shares_of_the_others(lengths):
    groups = [(0, 3, 4), (1,), (2,)]
    sums = carried(groups, lengths)
    for ranks in groups:
        pieces = [piece for member in ranks for piece in sums[member]]
        for rank, length in enumerate(lengths):
            elements = [n for r, begin, end in pieces if r == rank for n in range(begin, end)]
            assert sorted(elements) == [*range(length)]
        foreign = [sum(end - begin for _, begin, end in sums[member][1:]) for member in ranks]
        assert max(foreign) - min(foreign) <= 1
        assert all(sums[member][0] == (member, 0, lengths[member]) for member in ranks)


def test_the_fastest_route_between_hosts_is_chosen():
    assert group_by_host([4, 7, 4, 4, 7]) == ((0, 2, 3), (1, 4))
    lanes = Route("ring", 8)
    assert (link.routes(["ring"], 1), link.routes(["ring"], 8)) == (
        [link.MPI_ROUTE, RING],
        [link.MPI_ROUTE, RING, lanes],
    )
    measured = link.RouteChoice(lanes, seconds={link.MPI_ROUTE: 0.0413, lanes: 0.023})
    expected = "ring in 8 lanes (measured, 2 MB: mpi 41.3 ms, ring in 8 lanes 23.0 ms)"
    assert (measured.describe(), link.RouteChoice(RING).describe()) == (expected, "ring")
    for short, long, chosen, min_bytes in (
        ((2, 1, 3), (9, 4, 3), RING, link.LONG_BYTES // 2),
        ((2, 1, 1), (9, 4, 3), RING, link.SHORT_BYTES),
        ((2, 3, 3), (9, 4, 5), PAIRWISE, link.LONG_BYTES // 2),
        ((2, 1, 1), (3, 4, 5), link.MPI_ROUTE, link.SHORT_BYTES),
        ((2, 1, 1), (9, 10, 11), PAIRWISE, link.SHORT_BYTES),  # MPI's is not clearly faster
    ):
        names = link.MPI_ROUTE, PAIRWISE, RING
        long_seconds = dict(zip(names, long, strict=True))
        choice = link.choose(dict(zip(names, short, strict=True)), long_seconds)
        assert choice == (chosen, min_bytes, long_seconds)


def test_interfaces_are_set_for_every_library_or_named_if_wrong():
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
    for names, message in (
        ("eth0,eth7,", "no interface eth7 is up on .* choose from docker0, eth0,"),
        ("lo", "no interface lo is up on "),
        (" , ", "' , ' names no interface; give names such as eth0"),
    ):
        with pytest.raises(UserError, match=f"--network-interface: {message}"):
            limit_to(names, environ, ["eth0", "docker0"])


BYTES = {"bf16": 0.5, "int8": 0.254, "int4": 0.129}
ROUNDING = {"bf16": 2**-8, "int8": 0.51 / 127, "int4": 0.51 / 7}


def arrived(name, values):
    encoded = FORMATS[name].encode(values.clone(), torch.empty_like(values))
    decoded = torch.empty_like(values)
    FORMATS[name].decode(encoded, decoded)
    return decoded


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 5000, 70_000])
def test_values_arrive_to_within_a_rounding(name, count):
    wire = FORMATS[name]
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 1e-6
    sent, lost = values.clone(), torch.full_like(values, 9.0)
    encoded = wire.encode(sent, lost)
    assert encoded.dtype is torch.uint8
    assert encoded.shape == (wire.size(count),)
    decoded = torch.full_like(values, 9.0)
    wire.decode(encoded, decoded)
    # Bit by bit, signs of zeros included: the sender takes what the others get.
    assert torch.equal(decoded.view(torch.int32), sent.view(torch.int32))
    torch.testing.assert_close(decoded + lost, values, rtol=1e-6, atol=0.0)
    for part, received in zip(values.split(256), decoded.split(256), strict=True):
        if part.numel():
            assert (part - received).abs().max() <= ROUNDING[name] * part.abs().max()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_and_zeros_stay(name, bad):
    assert FORMATS[name].size(1 << 20) / (4 << 20) == pytest.approx(BYTES[name], abs=1e-3)
    values = torch.ones(600)
    values[300] = bad
    decoded = arrived(name, values)
    assert not decoded[300].isfinite()
    assert torch.equal(decoded[:256], torch.ones(256))
    values = torch.zeros(600)
    values[256:] = 1e-45
    assert name == "bf16" or not arrived(name, values).any()


def test_residuals_follow_their_parameters_to_other_buffers_and_runs():
    residuals = Residuals("int4")
    buffer = torch.zeros(5)
    residual = residuals.add(buffer, {"a": slice(0, 2), "b": slice(2, 4)})
    assert residual.count == 4  # what follows the gradients crosses as it is
    residual.lost_part(0, 4).copy_(torch.arange(4.0))
    residuals.keep()
    residuals.clear()
    first = residuals.add(torch.zeros(2), {"b": slice(0, 2)})
    second = residuals.add(torch.zeros(2), {"a": slice(0, 2)})
    assert (first.value.tolist(), second.value.tolist()) == ([2, 3], [0, 1])
    later = Residuals("int4")
    later.load_state_dict(residuals.state_dict())
    assert later.add(buffer, {"a": slice(0, 2), "b": slice(2, 4)}).value.tolist() == [0, 1, 2, 3]
    third = later.add(buffer, {"c": slice(0, 4)})
    assert third.value is None
    later.load_state_dict({"c": torch.ones(4)})
    assert third.value.tolist() == [1, 1, 1, 1]
    # Float64 and fp32 cross as they are.
    assert Residuals("int8").add(torch.zeros(3, dtype=torch.float64), {"a": slice(0, 3)}) is None
    assert Residuals().add(torch.zeros(3), {"a": slice(0, 3)}) is None


MB = 1 << 20


def stage(latency_sec, bytes_per_sec):
    return tuple(latency_sec + size / bytes_per_sec for size in chunking.SIZES)


def pipeline_sec(lengths, latency_sec, bytes_per_sec, copied_per_sec):
    """Return how long chunks take where the exchange has a latency and copies have none."""
    copied = exchanged = back = 0.0
    done = []
    for number, length in enumerate(lengths):
        copy_sec = length / copied_per_sec
        free = done[number - chunking.COUNT] if number >= chunking.COUNT else 0.0
        copied = max(copied, free) + copy_sec
        exchanged = max(copied, exchanged) + latency_sec + length / bytes_per_sec
        back = max(exchanged, back) + copy_sec
        done.append(back)
    return back


@pytest.mark.parametrize("latency_sec", by_default([5e-5, 2e-4, 1e-3], [5e-5, 1e-3]))
@pytest.mark.parametrize("bytes_per_sec", [1e8, 2e9, 2e10])
# As fast, or as much faster as on an H200.
@pytest.mark.parametrize("copies", by_default([1, 2, 12], [1, 12]))
@pytest.mark.parametrize("total", [1 * MB, 25 * MB, 64 * MB, 1 << 30])
def test_no_other_length_is_clearly_faster(latency_sec, bytes_per_sec, copies, total):
    speeds = latency_sec, bytes_per_sec, copies * bytes_per_sec
    stages = stage(*speeds[:2]), *[stage(0.0, speeds[2])] * 2
    pace = chunking.ChunkLengths(chunking.half_performance_bytes(stages), 8 * MB)
    ours = pipeline_sec(pace.lengths(total), *speeds)
    sizes = [min(64 << 10 << power, total) for power in range(8)]
    best = min(pipeline_sec([size] * -(-total // size), *speeds) for size in sizes)
    assert ours <= 1.05 * best


def test_buffers_grow_from_those_of_an_empty_chunk():
    slots = Slots(pins=False)
    chunk = torch.ones(3)
    for length in (0, 3, 1):
        assert slots.provide(1, chunk[:length].nbytes) == 1
        assert slots.take().view_as(chunk[:length]).shape == (length,)
    assert slots.take().memory.nbytes == 12


@pytest.mark.parametrize("half", [1, 70_000, 500_000, 3 * MB, 10**9])
@pytest.mark.parametrize("memory_mb", [1, 3, 32, 1000])
def test_chunks_add_up_and_fit(half, memory_mb):
    longest = chunking.longest_chunk(memory_mb)
    assert memory_mb * MB / 2 < chunking.COUNT * longest <= memory_mb * MB
    for seconds in ((1e-3, 1e-3), (2e-3, 1e-3), (0.0, 0.0), (0.0, 1e-3)):  # under a passing load
        assert chunking.half_performance_bytes([seconds]) >= 1
        assert chunking.half_performance_bytes([seconds, (1e-3, 2e-3)]) >= 1
    slow = (0.5e-3, 2.5e-3)  # whose latency seems to be negative
    assert chunking.half_performance_bytes([slow, (1e-4, 4e-4)]) > 100_000
    pace = chunking.ChunkLengths(half, longest)
    for total in [0, 2, 99_998, 65_536, MB, 25 * MB + 6, 64 * MB, (1 << 30) + 8]:
        lengths = pace.lengths(total)
        assert sum(lengths) == total
        assert max(lengths) <= pace.limit_bytes
        assert not any(length % 64 for length in lengths[:-1])
        assert min(lengths) > 0 or lengths == [0]


OPTIONS = AllgatherOptions()


# Names as in ProcessGroupNCCL of torch 2.14, and of 2.8 to 2.13.
@pytest.mark.parametrize(
    ("has", "start", "tensors", "called"),
    [
        ("all_gather_single_coalesced _allgather_base", releases.all_gather_single, "ab",
            [("all_gather_single_coalesced", ["a", "b"], ["x", "y"])]),
        ("_allgather_base", releases.all_gather_single, "ab",
            [("_allgather_base", "a", "x"), ("_allgather_base", "b", "y")]),
        ("_reduce_scatter_base", releases.reduce_scatter_single, "a",
            [("_reduce_scatter_base", "a", "x")]),
        ("alltoall_base", partial(releases.all_to_all_single, ([1], [1])), "a",
            [("alltoall_base", "a", "x", [1], [1])]),
    ],
)  # fmt: skip
def test_an_operation_is_found_under_the_librarys_name_for_it(has, start, tensors, called):
    calls = []
    methods = {name: partial(lambda *call: calls.append(call), name) for name in has.split()}
    works = start(OPTIONS, SimpleNamespace(**methods), [*tensors], [*"xy"][: len(tensors)])
    assert calls == [(*call, OPTIONS) for call in called]
    assert len(works) == len(called)
