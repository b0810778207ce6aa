"""Facts about ranks that exist only on paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kaitian_mpi.preflight.facts import Devices, HostFacts, Kind, Mpi, RankFacts, Software, Storage

GIB = 1 << 30
SOFTWARE = Software(
    python="3.11.7",
    packages={
        "kaitian-mpi": "0.1.0", "torch": "2.13.0+cpu", "mpi4py": "4.1.2", "numpy": "2.4.6",
        "psutil": "7.0.0", "rich": "14.0.0",
    },
    protocol=1,
)  # fmt: skip
MACHINE = HostFacts(
    cores=[*range(8)], launcher_cores=8, shm_bytes=16 * GIB, shm_free_bytes=15 * GIB,
    open_files=65_536,
)  # fmt: skip
MPI = Mpi(
    library="Open MPI 5.0.11", threads="multiple", size=2, launched=2, survives_requested=False,
    survives=True,
)  # fmt: skip
DEVICES = Devices(
    kinds=(Kind(name="acme", count=0, is_host=False), Kind(name="cpu", count=8, is_host=True)),
    faults={}, seen={}, requested="auto", shares=False, chosen="cpu", physical_id="", kind="cpu",
    name="a processor", memory_bytes=32 * GIB, is_host=True, error="", ram_bytes=32 * GIB,
    ram_free_bytes=30 * GIB, drivers={},
)  # fmt: skip
STORAGE = Storage(folder="/runs", free_bytes=100 * GIB, error="")


def rank_facts(rank: int = 0, host: str = "a", **parts: dict[str, Any]) -> RankFacts:
    """Return the facts of a rank with which all is well, but for these fields of its parts."""
    whole = RankFacts(
        rank=rank, host=host, local_rank=0, local_size=1, software=SOFTWARE, machine=MACHINE,
        mpi=MPI, devices=DEVICES, storage=STORAGE,
    )  # fmt: skip
    for name, fields in parts.items():
        if isinstance(getattr(whole, name), dict | int | str):
            whole = replace(whole, **{name: fields})
        else:
            whole = replace(whole, **{name: replace(getattr(whole, name), **fields)})
    return whole


def with_package(name: str, version: str) -> dict[str, Any]:
    """Return the fields of `Software` with another version of a package."""
    return {"packages": {**SOFTWARE.packages, name: version}}
