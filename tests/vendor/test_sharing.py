"""Ranks that share one device, which a vendor's library refuses."""

import fake_library
import pytest
import torch
import torch.distributed as dist
from fake_device import on_device, values
from fake_kinds import SHARED

import kaitian_mpi
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.observe.console import show_topology

DEVICES = f"vendor:{SHARED},vendor:{SHARED}"


@pytest.mark.sizes(2)
def test_two_ranks_on_one_device_are_refused_or_use_host_memory(capsys):
    if dist.is_initialized():
        dist.destroy_process_group()
    pair = r"rank 0 \(\S+, \S+ \S+\) and rank 1 \(.*\)"
    refused = rf"{pair} share one device \(shared\), which \S+ refuses within a group"
    with pytest.raises(AgreedError, match=refused) as raised:
        kaitian_mpi.init(devices=DEVICES)
    assert "--share-device" in str(raised.value)
    world = kaitian_mpi.init(devices=DEVICES, share_device=True)
    assert world.kinds == ("vendor", "vendor")
    calls = list(fake_library.calls)
    tensor = on_device(torch.full((5,), world.rank + 1.0))
    dist.all_reduce(tensor)
    assert values(tensor).tolist() == [3.0] * 5
    alone = [dist.new_group([rank]) for rank in range(2)][world.rank]
    assert fake_library.calls == calls
    dist.all_reduce(tensor, group=alone)  # which needs neither library nor host memory
    assert values(tensor).tolist() == [3.0] * 5
    assert fake_library.calls == calls
    show_topology(world)
    if world.rank == 0:
        line = "share one device: group vendor communicates through host memory, not by fakeccl"
        assert line in " ".join(capsys.readouterr().out.split())
    dist.destroy_process_group()
