"""Who the ranks are: their kinds, hosts, groups and settings, and what they agree on."""

import time
from types import SimpleNamespace

import pytest
import torch

import kaitian_mpi
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, check_same, gather_values
from kaitian_mpi.mpi.topology import GROUP_VARIABLE, agree_on_settings, split_into_groups
from kaitian_mpi.mpi.world import _exchange_visible, join_world, share_cores
from kaitian_mpi.runtime import polling


def test_every_rank_knows_every_rank(world):
    assert [info.world_rank for info in world.infos] == list(range(world.size))
    assert world.kinds == tuple("even" if r % 2 == 0 else "odd" for r in range(world.size))
    assert all(info.emulated and info.memory_bytes > 0 for info in world.infos)
    assert world.threads >= 1
    assert world.group.kind == world.info.kind
    assert world.rank in world.group.ranks


@pytest.mark.sizes(3)
def test_ranks_may_have_different_releases_of_torch_but_not_of_this_package(world, monkeypatch):
    if world.rank == 1:
        monkeypatch.setattr(torch, "__version__", "1.0+acme")
    # The store of the other tests stays.
    monkeypatch.setattr("kaitian_mpi.mpi.world._open_store", lambda comm: None)
    joined = join_world(world.comm)
    assert [info.torch_version == "1.0+acme" for info in joined.infos] == [False, True, False]
    joined.comm.Free()
    if world.rank == 1:
        versions = {"kaitian-mpi": "0.0"}
        monkeypatch.setattr(
            "kaitian_mpi.preflight.facts._version", lambda name: versions.get(name, "")
        )
    message = (
        "the version of kaitian-mpi differs between ranks: "
        f"{kaitian_mpi.__version__} on ranks 0, 2, 0.0 on rank"
    )
    with pytest.raises(AgreedError, match=message):
        join_world(world.comm)


@pytest.mark.sizes(3)
@pytest.mark.parametrize(
    ("cores_of", "threads", "nap_sec"),
    [
        (lambda rank: {rank}, 1, 2e-4),  # bound to one each
        (lambda rank: {*range(7)}, 2, 2e-4),
        (lambda rank: {0, 1}, 1, 1e-3),
    ],
)
def test_ranks_that_share_cores_look_less_often_while_they_wait(
    world, monkeypatch, cores_of, threads, nap_sec
):
    naps = []
    monkeypatch.setattr(polling, "_shares_core", None)
    monkeypatch.setattr(polling, "time", SimpleNamespace(sleep=naps.append))
    with monkeypatch.context() as cores:
        cores.setattr("kaitian_mpi.mpi.world.usable_cores", lambda: cores_of(world.rank))
        cores.setattr(polling, "time", time)
        assert share_cores(world.comm) == threads
    polling.nap(10e-3)
    assert naps == [pytest.approx(nap_sec)]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("rule", ["auto", "kind", "kind-and-host"])
def test_split_by_kind_and_host(world, rule):
    """Ranks 0 and 1 are alike on one host; the others on a second one, where the last differs."""
    kinds = ["a"] * (world.size - 1) + ["b"]
    nodes = [0, 0] + [5] * (world.size - 2)
    comms = split_into_groups(world.comm.Dup(), kinds, nodes, rule)
    by_kind = [tuple(range(world.size - 1)), (world.size - 1,)]
    by_host = [(0, 1), tuple(range(2, world.size - 1)), (world.size - 1,)]
    expected = by_host if rule == "kind-and-host" else by_kind
    assert [group.ranks for group in comms.groups] == expected
    assert (comms.by_host is not None) == (rule == "auto")
    if comms.by_host is not None:
        assert [group.ranks for group in comms.by_host.groups] == by_host
        assert [group.node for group in comms.by_host.groups] == [0, 5, 5]
        assert comms.by_host.lanes == 1
        lane = comms.by_host.lane
        assert (lane is not None) == (world.rank in (0, 2, world.size - 1))
    comms.free()


def test_one_rank_may_say_how_to_group_and_another_way_is_an_error_on_every_rank(
    world, last, monkeypatch
):
    def set_on_last(rule):
        if world.rank == last:
            monkeypatch.setenv(GROUP_VARIABLE, rule)

    assert agree_on_settings(world.comm).group_by == "auto"
    set_on_last("kind-and-host")
    assert agree_on_settings(world.comm).group_by == "kind-and-host"
    assert agree_on_settings(world.comm, "kind-and-host").group_by == "kind-and-host"
    set_on_last("host")
    value = "'host'" if world.size == 1 else f"rank {last}: 'host'"
    advice = "give every rank the same, one of auto, kind, kind-and-host"
    with pytest.raises(AgreedError, match=f"{GROUP_VARIABLE} is {value}; {advice}"):
        agree_on_settings(world.comm)
    if world.size > 1:
        rank_rule = "kind" if world.rank else "kind-and-host"
        with pytest.raises(AgreedError, match=r"rank 0: 'kind-and-host'; ranks? 1"):
            agree_on_settings(world.comm, rank_rule)


def test_one_ranks_error_is_raised_on_every_rank(world):
    text = "no such file" if world.size == 1 else "rank 0: no such file"
    with pytest.raises(AgreedError, match=f"^{text}$"), agree_on_errors(world.comm):  # noqa: PT012
        if world.rank == 0:
            raise UserError("no such file")
    with agree_on_errors(world.comm):
        pass


@pytest.mark.ranks(2)
def test_differing_values_are_named_with_their_ranks(world):
    with pytest.raises(AgreedError, match=r"the model differs .* 1 on rank 0, 2 on ranks? 1"):
        check_same(world.comm, {"the model": "1" if world.rank == 0 else "2"}, "use one")
    check_same(world.comm, {"the model": "1", f"what rank {world.rank} has": "2"}, "use one")


def test_what_ranks_see_is_ordered_by_local_rank(world):
    """mpirun need not number the ranks of a host in the order of their world ranks."""
    local_rank = world.size - 1 - world.rank
    wants_share = world.rank == world.size - 1
    visible = {"cuda": [f"GPU-{world.rank}"]}
    node, inventories, may_share = _exchange_visible(world.comm, local_rank, visible, wants_share)
    assert node == 0
    assert inventories == [{"cuda": [f"GPU-{rank}"]} for rank in reversed(range(world.size))]
    assert may_share


@pytest.mark.parametrize("length", [0, 254, 255, 100_000])  # and two quotation marks
def test_values_of_unlike_lengths_are_gathered_by_rank(world, last, length):
    values = ["x" * length if rank == last else {"é": rank} for rank in range(world.size)]
    assert gather_values(world.comm, values[world.rank]) == values
