"""Lightning's view of the ranks that mpirun has started, however many there are on each host."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0

_CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}
"""By their modules, the classes that find the devices of a Trainer or a Fabric."""
_ENVIRONMENTS = (
    "lightning.fabric.plugins.environments.torchelastic",
    "lightning_fabric.plugins.environments.torchelastic",
)
_FIND_DEVICES = "_set_parallel_devices_and_init_accelerator"


def use_started_ranks(world: World) -> None:
    """Make Lightning, once it is imported, train on this job's ranks; not in a job of one rank.

    It demands that `devices` times `num_nodes` is the number of ranks, so that hosts must have
    equally many (fabric/plugins/environments/torchelastic.py, `validate_settings`). Here each
    rank's own device stands for the devices of all ranks, on one node.
    """
    if world.size == 1:
        return
    number = number_on_host(world.infos, world.rank)
    extensions: dict[str, Callable[[ModuleType], None]] = {
        name: functools.partial(_extend_connector, class_name, world, number)
        for name, class_name in _CONNECTORS.items()
    }
    extensions |= {
        name: functools.partial(_extend_environment, number=number) for name in _ENVIRONMENTS
    }
    for name in list(extensions):
        if name in sys.modules:
            extensions.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _ExtendOnImport(extensions))


def number_on_host(infos: Sequence[RankInfo], rank: int) -> int:
    """Return the rank's number among those of its host, in the order of their `LOCAL_RANK`.

    That is the index of a device, of which none may be 0, or several where ranks share one.
    """

    def order(info: RankInfo) -> tuple[bool, int, int]:
        index = 0 if info.is_on_host else int(info.device.partition(":")[2] or 0)
        return info.is_on_host, index, info.local_rank

    here = sorted((info for info in infos if info.node == infos[rank].node), key=order)
    return [info.world_rank for info in here].index(infos[rank].world_rank)


class _ExtendOnImport(importlib.abc.MetaPathFinder):
    """Extends modules when they have been imported."""

    def __init__(self, extensions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._extensions = extensions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._extensions:
            return None
        extend = self._extensions.pop(name)
        spec = importlib.util.find_spec(name)  # by the other finders
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_extend(module: ModuleType) -> None:
            execute(module)
            extend(module)

        spec.loader.exec_module = execute_and_extend  # type: ignore[method-assign]
        return spec


def _extend_connector(class_name: str, world: World, number: int, module: ModuleType) -> None:
    connector = getattr(module, class_name, None)
    find_devices = getattr(connector, _FIND_DEVICES, None)
    if connector is None or find_devices is None:  # of another release: as Lightning does alone
        return

    @functools.wraps(find_devices)
    def find_own_device(self: Any) -> None:
        if _is_for_one_device(self):
            find_devices(self)
            print_rank_0(
                world,
                "Lightning: devices=1 is one rank by itself; leave out devices and num_nodes to "
                f"train on all {world.size} ranks",
            )
            return
        self._devices_flag = "auto"  # the job's ranks have their devices already
        find_devices(self)
        devices = self._parallel_devices
        index = int(os.environ["LOCAL_RANK"])
        device = devices[min(index, len(devices) - 1)]
        count = len(devices)
        if count * self._num_nodes_flag != world.size or number >= count:
            count = world.size
            self._num_nodes_flag = 1
        self._parallel_devices = [device] * count

    setattr(connector, _FIND_DEVICES, find_own_device)


def _is_for_one_device(connector: Any) -> bool:
    """Return whether the script asks for one device and no strategy, as to evaluate on rank 0."""
    devices = connector._devices_flag
    is_one = devices in (1, "1") or (isinstance(devices, list | tuple) and len(devices) == 1)
    return is_one and connector._num_nodes_flag == 1 and connector._strategy_flag == "auto"


def _extend_environment(module: ModuleType, number: int) -> None:
    """Have one rank of each host prepare the data, whatever the index of its device is."""
    module.TorchElasticEnvironment.local_rank = lambda self: number  # type: ignore[attr-defined]
