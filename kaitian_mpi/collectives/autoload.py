"""Making the backend known to torch, without loading MPI.

torch calls `register` at the end of `import torch`, through the entry point `torch.backends`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kaitian_mpi.collectives import BACKEND, DEVICE_TYPES, SCHEME
from kaitian_mpi.collectives.torch_functions import admit_to_monitored_barrier
from kaitian_mpi.mpi.threads import note_threads


def register() -> None:
    """Register the backend `kaitian` and the rendezvous `mpi://`; harmless a second time."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import register_rendezvous_handler

    if not dist.is_available() or BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=DEVICE_TYPES)
    register_rendezvous_handler(SCHEME, _rendezvous)
    note_threads()
    admit_to_monitored_barrier()


def _create(options: Any, _: Any = None) -> Any:
    from kaitian_mpi.collectives.creation import create

    return create(options)


def _rendezvous(url: str, **options: Any) -> Iterator[Any]:
    from kaitian_mpi.mpi.rendezvous import rendezvous

    # torch puts what the script gives as `rank` and `world_size` into the address.
    given = dict(parse_qsl(urlsplit(url).query))
    rank, size = (int(given[name]) if name in given else None for name in ("rank", "world_size"))
    return rendezvous(rank, size, options.get("timeout"))
