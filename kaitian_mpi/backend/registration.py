"""Making the backend known to torch, without loading MPI.

torch calls `register` at the end of `import torch`, through the entry point `torch.backends`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kaitian_mpi.backend import BACKEND, SCHEME, device_types
from kaitian_mpi.runtime.threads import record_default_threads


def register() -> None:
    """Register the backend `kaitian` and the rendezvous `mpi://`; harmless a second time."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import register_rendezvous_handler

    if not dist.is_available() or BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=device_types())
    # Become no type's default backend: that is the vendor's own, which may be registered later.
    defaults = dist.Backend.default_device_backend_map
    for device_type in [name for name, backend in defaults.items() if backend == BACKEND]:
        del defaults[device_type]
    register_rendezvous_handler(SCHEME, _rendezvous)
    record_default_threads()
    admit_to_monitored_barrier()


def _create(options: Any, _: Any = None) -> Any:
    from kaitian_mpi.backend.creation import create

    return create(options)


def _rendezvous(url: str, **options: Any) -> Iterator[Any]:
    from kaitian_mpi.mpi.rendezvous import rendezvous

    # torch puts what the script gives as `rank` and `world_size` into the address.
    given = dict(parse_qsl(urlsplit(url).query))
    rank, size = (int(given[name]) if name in given else None for name in ("rank", "world_size"))
    return rendezvous(rank, size, options.get("timeout"))


def replace(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Let every loaded module of torch.distributed that knows a function have another.

    `device_mesh`, for one, has its own reference to `new_group`.
    """
    for place, module in list(sys.modules.items()):
        if place.startswith("torch.distributed") and vars(module).get(old.__name__) is old:
            vars(module)[old.__name__] = new


def admit_to_monitored_barrier() -> None:
    """Let `torch.distributed.monitored_barrier` take our groups: torch refuses all but gloo's."""
    import torch.distributed as dist

    torchs = dist.monitored_barrier

    @functools.wraps(torchs)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: Any = False
    ) -> Any:
        is_ours = dist.get_rank(group) >= 0 and dist.get_backend(group) == BACKEND
        if not is_ours:
            return torchs(group, timeout, wait_all_ranks)
        ours: Any = group or dist.group.WORLD
        return ours.monitored_barrier(timeout, wait_all_ranks)

    replace(torchs, monitored_barrier)
