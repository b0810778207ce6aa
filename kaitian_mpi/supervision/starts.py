"""Plans a start of the job, given the hosts that are lost. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from kaitian_mpi.launch.command import HOST_LISTS, HOSTFILES, Command
from kaitian_mpi.launch.hosts import (
    Host,
    host_list_without,
    hostfile_without,
    place_by_slot,
    total_slots,
)
from kaitian_mpi.supervision.ranks import (
    fewer_ranks,
    kept_ranks,
    kinds_of,
    slowdowns_of,
)

_MAX_NAMES = 8
# Slows no rank; unlike an empty list, it takes precedence over the variable, which numbers the
# ranks of the whole job.
_NO_SLOWDOWN = "0:1"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as given on the command line."""

    command: Command
    hosts: tuple[Host, ...]
    """The hosts in hostfiles and host lists; empty if there are none, e.g. under a batch system."""
    local: frozenset[str] = frozenset()
    """The names in `hosts` of this machine, which is not probed."""
    hostfiles: Mapping[str, str]
    """The content of each hostfile, by the path in the command."""
    run_dir: str
    """The run folder as passed to kaitian-train."""
    folder: Path
    """The path of the run folder for this process."""
    snapshots: str
    """The name under which hosts keep snapshots in memory between starts."""
    job_id: str = ""
    """Set in the environment of this job's ranks, to distinguish them from other jobs'."""
    keep_checkpoints: int = 1
    emulate_kinds: str = ""
    """By the flag or the environment variable; in a smaller job, by the flag."""
    emulate_slowdown: str = ""
    spares: int = 0

    @property
    def ranks(self) -> int | None:
        """The number of ranks of the job with all hosts; None if unknown."""
        return self.command.ranks or (total_slots(self.hosts) if self.hosts else None)

    @property
    def survives(self) -> bool:
        """Whether mpirun lets the job continue after a rank is lost (`--with-ft ulfm`)."""
        return bool(self.command.values(("with-ft",)))

    @property
    def owns_snapshots(self) -> bool:
        """Whether the snapshots' name was generated here, not given by the user."""
        return not _is_given("--snapshots", self.command.arguments)

    @property
    def remote(self) -> list[Host]:
        """The hosts other than this machine, which can be lost."""
        return [host for host in self.hosts if host.name not in self.local]

    def left(self, lost: Set[str]) -> list[Host]:
        """Return the hosts that can still run ranks, without the lost ones."""
        return [host for host in self.hosts if host.name not in lost and host.slots != 0]


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the job."""

    words: list[str]
    """The command."""
    hostfile: str = ""
    """The content of the new hostfile in the command; empty if it uses the user's hostfiles."""
    shape: str
    """The number of ranks and the hosts, for messages."""


def plan_start(job: Job, lost: Set[str], trained: bool, new_hostfile: str) -> Start:
    """Plan a start of the job without the lost hosts.

    Args:
        job: the job.
        lost: names of the lost hosts; at least one other must be left.
        trained: whether steps have been trained from which the job can resume.
        new_hostfile: the path for a hostfile without the lost hosts.
    """
    command, hostfile, ranks = job.command, "", job.ranks
    adapted: list[str] = []
    if lost:
        left = job.left(lost)
        ranks = fewer_ranks(job.ranks, left)
        command, hostfile = _without(job, lost, new_hostfile, ranks)
        adapted = _adapted_flags(job, lost, ranks)
    own = [*adapted, f"--run-dir={job.run_dir}"]
    # A user's --resume says where the job starts, not where it resumes after a failure.
    if trained or not _is_given("--resume", command.arguments):
        own += ["--resume=auto"]
    return Start(words=command.words + own, hostfile=hostfile, shape=_shape(job, lost, ranks))


def _without(job: Job, lost: Set[str], new_hostfile: str, ranks: int | None) -> tuple[Command, str]:
    """Return the command without some hosts, and the content of the hostfile it needs."""
    command = job.command
    hostfile = "".join(hostfile_without(text, lost) for text in job.hostfiles.values())
    if hostfile:
        command = command.replaced(HOSTFILES, [new_hostfile])
    lists = [host_list_without(text, lost) for text in command.values(HOST_LISTS)]
    command = command.replaced(HOST_LISTS, lists)
    if command.ranks is not None and ranks is not None:
        command = command.with_ranks(ranks)
    return command, hostfile


def _adapted_flags(job: Job, lost: Set[str], ranks: int | None) -> list[str]:
    """Return the flags that depend on the ranks, adapted to the smaller job.

    Spares replace the lost ranks, as far as there are any.
    """
    if job.ranks is None or ranks is None:
        return []
    placed = place_by_slot(job.hosts, job.ranks)
    kept = kept_ranks(placed, lost, ranks)
    flags = []
    if job.emulate_kinds:
        flags.append(f"--emulate-kinds={kinds_of(job.emulate_kinds, kept, job.ranks)}")
    if job.emulate_slowdown:
        slowdown = slowdowns_of(job.emulate_slowdown, kept) or _NO_SLOWDOWN
        flags.append(f"--emulate-slowdown={slowdown}")
    if job.spares:
        flags.append(f"--spares={max(0, job.spares - (job.ranks - ranks))}")
    return flags


def _is_given(flag: str, arguments: Sequence[str]) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in arguments)


def _shape(job: Job, lost: Set[str], ranks: int | None) -> str:
    count = "" if ranks is None else f"{ranks} rank{'' if ranks == 1 else 's'}"
    names = list_names([host.name for host in job.left(lost)])
    return " on ".join(filter(None, [count, names])) or "as mpirun chooses"


def list_names(names: Sequence[str]) -> str:
    """Join names in one line; of many, only the first few."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
