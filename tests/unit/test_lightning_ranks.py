"""The devices that Lightning takes for those of the job."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kaitian_mpi.integrations import lightning_ranks
from kaitian_mpi.integrations.lightning_ranks import use_started_ranks
from kaitian_mpi.mpi.topology import RankInfo

NAME = "lightning.fabric.connector"


class Connector:
    """Finds devices as Lightning's does, on a host with some GPUs."""

    def __init__(self, gpus, devices="auto", num_nodes=1, strategy="auto"):
        self._gpus, self._devices_flag = gpus, devices
        self._num_nodes_flag, self._strategy_flag = num_nodes, strategy

    def _set_parallel_devices_and_init_accelerator(self):
        count = self._gpus if self._devices_flag == "auto" else self._devices_flag
        assert count <= self._gpus, "You requested more than your machine has"
        self._parallel_devices = [f"cuda:{index}" for index in range(count)]


@pytest.mark.parametrize(
    ("rank", "local_rank", "gpus", "options", "expected"),
    [
        (1, 1, 2, {"devices": 2, "num_nodes": 2}, (1, ["cuda:1"] * 3)),
        (2, 0, 1, {"devices": 2, "num_nodes": 2}, (1, ["cuda:0"] * 3)),
        (2, 0, 1, {}, (1, ["cuda:0"] * 3)),
        (2, 0, 1, {"num_nodes": 3}, (3, ["cuda:0"])),  # as one of each of three nodes
        (1, 5, 6, {"strategy": "ddp", "devices": 1}, (1, ["cuda:5"] * 3)),
        (0, 0, 2, {"devices": 1}, (1, ["cuda:0"])),  # by itself
    ],
)
def test_a_ranks_own_device_stands_for_those_of_all_ranks(
    monkeypatch, capsys, rank, local_rank, gpus, options, expected
):
    module = ModuleType(NAME)
    module._Connector = type("_Connector", (Connector,), {})
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.setattr(lightning_ranks, "_CONNECTORS", {NAME: "_Connector"})
    monkeypatch.setattr(lightning_ranks, "_ENVIRONMENTS", ())
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    infos = [
        RankInfo(number, local, "h", "cuda", f"cuda:{local}", "", 0, "", node=node)
        for number, (local, node) in enumerate([(0, 0), (1, 0), (0, 1)])
    ]
    use_started_ranks(SimpleNamespace(rank=rank, size=3, infos=infos))
    connector = module._Connector(gpus, **options)
    connector._set_parallel_devices_and_init_accelerator()
    assert (connector._num_nodes_flag, connector._parallel_devices) == expected
    is_by_itself = options == {"devices": 1}
    assert ("train on all 3 ranks" in capsys.readouterr().out) == is_by_itself
