"""Initializes MPI and torch.distributed over `kaitian`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi.distributed import BACKEND, SCHEME, registration
from kaitian_mpi.distributed.registration import replace
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.world import World, current_world, join_world, set_current_world
from kaitian_mpi.runtime.abort import install_abort_hook
from kaitian_mpi.runtime.lifecycle import initialize_mpi

_requested = ""  # the arguments of the first `init`


def init(
    devices: str = "auto",
    emulate_kinds: str = "",
    emulate_slowdown: str = "",
    share_device: bool = False,
    group_by: str = "auto",
    vendor_library: bool = True,
) -> World:
    """Initialize MPI, choose this rank's device, and initialize torch.distributed over `kaitian`.

    Collective over all ranks that mpirun started; without mpirun, a job of one rank. Called again
    with the same arguments, it returns the ranks of the default process group, without
    communication.

    Args:
        devices: `auto`, `cpu`, or a list by local rank such as `cuda:0,cuda:1,cpu`.
        emulate_kinds: labels for CPU ranks by world rank, such as `gpu,gpu,mlu,mlu`; empty: those
            in the environment variable `KAITIAN_EMULATE_KINDS`, if any.
        emulate_slowdown: ranks to slow down by sleeping, such as `2:3.0,3:1.5`; empty: those in
            `KAITIAN_EMULATE_SLOWDOWN`, if any. Also the default of `Training`.
        share_device: let several ranks use one device; the ranks of such a group communicate
            through host memory. Also if the environment variable `KAITIAN_SHARE_DEVICE` is 1.
        group_by: how ranks are grouped: by `kind`, or by `kind-and-host` if vendors' libraries
            connect no hosts. `auto`: as `KAITIAN_GROUP_BY` says, if it is set; else by `kind`, and
            a `Training` measures whether `kind-and-host` is faster.
        vendor_library: whether groups use their vendor's collective library. If it is false on any
            rank, or the environment variable `KAITIAN_VENDOR_LIBRARY` is 0 there, no rank uses one:
            all groups communicate through host memory.

    Raises:
        UserError: a device is missing, a host has more ranks than devices, two ranks share a
            device without `share_device`, there is no MPI, an emulation or a variable is malformed,
            or torch.distributed is initialized already over another backend or with other
            arguments.
    """
    global _requested
    arguments: dict[str, Any] = dict(locals())
    install_abort_hook()
    requested = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    if dist.is_initialized():
        return _initialized_world(requested)
    world = current_world()
    # kaitian-run has made a world by its --devices. A second `init` may choose others.
    parameters = inspect.signature(init).parameters
    has_choice = any(p.default != arguments[name] for name, p in parameters.items())
    if world is None or _requested or has_choice:
        world = join_world(initialize_mpi(), **arguments)
    registration.register()
    open_process_group(world)
    _requested = requested
    return world


def _initialized_world(requested: str) -> World:
    """Return the ranks of the existing default process group."""
    world = current_world()
    backend = dist.get_backend()
    if world is None or BACKEND not in backend:
        raise UserError(
            f"torch.distributed is initialized over {backend} already; call kaitian_mpi.init() "
            "instead of init_process_group()"
        )
    if _requested and requested != _requested:
        raise UserError(
            f"init() was called with {_requested} before, and now with {requested}; call it once"
        )
    return world


def open_process_group(world: World) -> None:
    """Create the default process group of these ranks. Collective over them."""
    set_current_world(world)
    dist.init_process_group(BACKEND, init_method=f"{SCHEME}://")


def close_process_group() -> None:
    """Destroy this rank's default process group, if any; after a loss also close the job's store.

    Does not wait for other ranks.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    world = current_world()
    if world is not None and world.store.link.is_lost:  # the server may have run on that rank
        world.store.close()


def use_backend_for(names: Iterable[str]) -> None:
    """Make scripts that name other backends use `kaitian`, with the `mpi://` rendezvous.

    Replaces `init_process_group` and `new_group` in torch.distributed, so it must be called before
    the script imports them. A default group without a store uses `mpi://`, so that no port is
    opened; a script's own store or other init_method is kept. `names` are backends, such as `nccl`,
    also as part of `cpu:gloo,cuda:nccl`. DistributedDataParallel ignores the devices that a script
    names for a model on the CPU, which torch would refuse.
    """
    registration.register()
    overridden = frozenset(names)
    start = dist.init_process_group
    subgroup = dist.new_group

    @functools.wraps(start)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        arguments = inspect.signature(start).bind(*args, **kwargs).arguments
        arguments["backend"] = _override(arguments.get("backend"), overridden)
        if arguments["backend"] == BACKEND:
            if arguments.get("init_method") in (None, "env://") and arguments.get("store") is None:
                arguments["init_method"] = f"{SCHEME}://"
            arguments.pop("device_id", None)  # binds a group to one vendor's device
        start(**arguments)

    @functools.wraps(subgroup)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(subgroup).bind(*args, **kwargs).arguments
        if arguments.get("backend") is not None:  # None: the default group's
            arguments["backend"] = _override(arguments["backend"], overridden)
        return subgroup(**arguments)

    replace(start, init_process_group)
    replace(subgroup, new_group)
    if overridden:
        _allow_devices_of_cpus()


def _allow_devices_of_cpus() -> None:
    create = DistributedDataParallel.__init__

    @functools.wraps(create)
    def create_on_device(*args: Any, **kwargs: Any) -> None:
        arguments = inspect.signature(create).bind(*args, **kwargs).arguments
        if all(parameter.is_cpu for parameter in arguments["module"].parameters()):
            arguments.pop("device_ids", None)
            arguments.pop("output_device", None)
        create(**arguments)

    DistributedDataParallel.__init__ = create_on_device  # type: ignore[method-assign]


def _override(backend: str | None, overridden: frozenset[str]) -> str | None:
    """Return `kaitian` for an overridden backend, or for none if any backend is overridden."""
    if backend is None:
        return BACKEND if overridden else None
    named = {part.rpartition(":")[2].lower() for part in str(backend).split(",")}
    return BACKEND if named & overridden else backend
