"""Facts about the ranks and hosts of a job; a `Verdict` says what they mean.

All can be written as JSON: `kaitian-doctor --json` prints these fields by their names, and ranks
send them to rank 0. A fact that could not be found is None, and `RankFacts.faults` says why. Those
that cost nothing are gathered here, in milliseconds: neither a device nor a disk is used.
"""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING, Any

from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.launcher import is_from_srun, read_launch
from kaitian_mpi.runtime.mpi_libraries import loaded_library
from kaitian_mpi.runtime.system import launcher_cores, usable_cores
from kaitian_mpi.runtime.tags import PROTOCOL

if TYPE_CHECKING:
    from mpi4py import MPI

SHM = "/dev/shm"  # noqa: S108  # nothing is written there
PACKAGES = ("kaitian-mpi", "torch", "mpi4py", "numpy", "psutil", "rich")
"""The packages that every rank needs."""
_THREADS = ("single", "funneled", "serialized", "multiple")


@dataclass(frozen=True, kw_only=True)
class Software:
    """Versions on a rank."""

    python: str
    packages: Mapping[str, str]
    """By distribution, such as `torch`; empty for one that is not installed."""
    protocol: int
    """The version of the messages between ranks, `runtime.tags.PROTOCOL`."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """A rank's host, as the rank sees it."""

    cores: Sequence[int]
    """The numbers of the cores that the rank may run on."""
    launcher_cores: int
    """Cores that the rank's launcher may run on."""
    shm_bytes: int | None
    """Size of /dev/shm; None if there is none."""
    shm_free_bytes: int | None
    open_files: int
    """The number of files that the rank may have open; -1 for no limit."""


@dataclass(frozen=True, kw_only=True)
class Mpi:
    """MPI as it runs on a rank."""

    library: str
    """Such as `Open MPI 5.0.8`."""
    threads: str
    """The thread level: `single`, `funneled`, `serialized` or `multiple`."""
    size: int
    """Ranks in MPI's world."""
    launched: int
    """Ranks that the launcher says it has started."""
    by_srun: bool = False
    """Whether the launcher is srun, not mpirun."""
    survives_requested: bool
    """Whether the job was started with fault tolerance (`mpirun --with-ft ulfm`)."""
    survives: bool
    """Whether the library has fault tolerance."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A device kind on a rank's host."""

    name: str
    count: int
    is_host: bool
    library: str = ""
    """The vendor's collective library; empty if it has none."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of a rank's host, and the rank's own."""

    kinds: tuple[Kind, ...]
    faults: Mapping[str, str]
    """Kinds that are installed and cannot be used, and why."""
    seen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The accelerators that the rank sees, by kind: their PCI addresses or UUIDs."""
    requested: str
    """The value of `--devices`."""
    shares: bool
    """Whether ranks may share a device (`--share-device`)."""
    vendor_library: bool = True
    """Whether the rank lets vendors' libraries be used (`--vendor-library`)."""
    chosen: str = ""
    """The rank's torch device, such as `cuda:0`; empty if none could be chosen."""
    physical_id: str = ""
    """Its PCI address or UUID; empty for the CPU."""
    kind: str = ""
    name: str = ""
    """Its product name."""
    memory_bytes: int = 0
    is_host: bool = False
    """Whether it is the CPU, so that nothing is copied to reach host memory."""
    error: str = ""
    """The reason why no device could be chosen or used; empty if one was."""
    ram_bytes: int
    ram_free_bytes: int
    """The memory that the host or the container has left for new processes."""
    drivers: Mapping[str, str]
    """Kernel drivers of accelerators that are loaded, and their versions."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The file system that would hold the run folder."""

    folder: str
    """The run folder, or the nearest existing folder above it."""
    free_bytes: int
    error: str
    """The reason why nothing could be written; empty if it could."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """All facts about one rank."""

    rank: int
    host: str
    local_rank: int
    local_size: int
    software: Software
    machine: HostFacts
    mpi: Mpi | None = None
    devices: Devices | None = None
    storage: Storage | None = None
    """On the first rank of each host; None on the others."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """The reason for each failed examination, by its name."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RankFacts:
        """Rebuild facts from `asdict`.

        Raises:
            OtherVersionError: the facts come from another version of this package.
        """
        fields = dict(content)
        try:
            for name in _PARTS.keys() & fields.keys():
                fields[name] = part_from_json(name, fields[name])
            return cls(**fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise OtherVersionError(version_in(content)) from error


class OtherVersionError(Exception):
    """Facts come from another version of this package; its text is the version."""


def version_in(content: Mapping[str, Any]) -> str:
    """Return the package version in facts of any version; `unknown` if it is missing."""
    try:
        return str(content["software"]["packages"]["kaitian-mpi"])
    except (TypeError, KeyError):
        return "unknown"


def part_from_json(name: str, content: Mapping[str, Any] | None) -> Any:
    """Rebuild the field `name` of `RankFacts` from `asdict`."""
    return None if content is None else _PARTS[name](**content)


def _devices(kinds: Any, seen: Any, **others: Any) -> Devices:
    seen = {kind: tuple(ids) for kind, ids in seen.items()}
    return Devices(kinds=tuple(Kind(**kind) for kind in kinds), seen=seen, **others)


_PARTS: Mapping[str, Callable[..., Any]] = {
    "software": Software,
    "machine": HostFacts,
    "mpi": Mpi,
    "devices": _devices,
    "storage": Storage,
}


@dataclass(frozen=True, kw_only=True)
class LinkFacts:
    """The measured link between two ranks."""

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    latency_us: float | None = None
    """Half the time of a small message there and back, in microseconds."""
    mb_per_sec: float | None = None
    """Bandwidth in one direction, in 10^6 bytes a second."""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """All facts about a job, or about a machine."""

    ranks: tuple[RankFacts, ...]
    """The ranks that have answered, in order."""
    missing: Mapping[int, str] = field(default_factory=dict)
    """The other ranks, with what is known about them."""
    links: tuple[LinkFacts, ...] = ()
    mpirun: str | None = None
    """The path of the shell's mpirun, empty if there is none; None if mpirun started the ranks."""

    @property
    def hosts(self) -> dict[str, list[RankFacts]]:
        """The ranks by host, in the order of their first ranks."""
        by_host: dict[str, list[RankFacts]] = {}
        for facts in self.ranks:
            by_host.setdefault(facts.host, []).append(facts)
        return by_host


def collect(host: str, rank: int) -> RankFacts:
    """Return the facts about this process that need neither MPI, torch nor devices."""
    launch = read_launch(os.environ)
    shm = os.statvfs(SHM) if os.path.isdir(SHM) else None
    return RankFacts(
        rank=rank,
        host=host,
        local_rank=launch.local_rank,
        local_size=launch.local_size,
        software=Software(
            python=platform.python_version(),
            packages={name: _version(name) for name in PACKAGES},
            protocol=PROTOCOL,
        ),
        machine=HostFacts(
            cores=sorted(usable_cores()),
            launcher_cores=len(launcher_cores()),
            shm_bytes=None if shm is None else shm.f_blocks * shm.f_frsize,
            shm_free_bytes=None if shm is None else shm.f_bavail * shm.f_frsize,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        ),
    )


def collect_mpi(comm: MPI.Comm) -> Mpi:
    """Return the facts about MPI, which must be initialized. Not collective."""
    from mpi4py import MPI

    survives = True
    try:
        MPI.COMM_SELF.Is_revoked()
    except (NotImplementedError, MPI.Exception):
        survives = False
    return Mpi(
        library=loaded_library(),
        threads=_THREADS[MPI.Query_thread()],
        size=comm.size,
        launched=read_launch(os.environ).world_size,
        by_srun=is_from_srun(os.environ),
        survives_requested=ulfm.is_enabled(),
        survives=survives,
    )


def _version(package: str) -> str:
    """Return a package's release; "" if it is not installed."""
    try:
        installed = distribution(package)
    except PackageNotFoundError:
        return ""
    # Its own `version` parses the whole file, which takes a rank's start milliseconds.
    line = re.search(r"^Version: *(\S+)", installed.read_text("METADATA") or "", re.MULTILINE)
    return line[1] if line else installed.version
