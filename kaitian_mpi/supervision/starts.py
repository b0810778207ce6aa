"""What a start of the job looks like, given the hosts that are lost. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from kaitian_mpi.supervision.command import HOST_LISTS, HOSTFILES, Command
from kaitian_mpi.supervision.hosts import Host, host_list_without, hostfile_without
from kaitian_mpi.supervision.ranks import (
    fewer_ranks,
    kept_ranks,
    kinds_of,
    place_by_slot,
    slowdowns_of,
    total_slots,
)

_MOST_NAMES = 8


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as its user asked for it."""

    command: Command
    hosts: tuple[Host, ...]
    """The hosts that mpirun uses; none where it finds them elsewhere, or uses this one only."""
    local: frozenset[str] = frozenset()
    """Names of those that are this machine, which needs no asking."""
    hostfiles: Mapping[str, str]
    """The content of each hostfile, by the path in the command."""
    run_dir: str
    """The run folder as passed to kaitian-train."""
    folder: Path
    """The run folder as it is seen from here."""
    snapshots: str
    """Under which name hosts keep snapshots in memory from one start to the next."""
    mark: str = ""
    """Marks the environment of this job's ranks, to tell them from those of other jobs."""
    keep_checkpoints: int = 1
    emulate_kinds: str = ""
    emulate_slowdown: str = ""
    spares: int = 0

    @property
    def ranks(self) -> int | None:
        """How many ranks the job has with all hosts; None where that cannot be known."""
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
        """The hosts that can be lost."""
        return [host for host in self.hosts if host.name not in self.local]

    def left(self, lost: Set[str]) -> list[Host]:
        """Return the hosts that can still take a rank, without those that are lost."""
        return [host for host in self.hosts if host.name not in lost and host.slots != 0]


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the job."""

    words: list[str]
    """The command."""
    hostfile: str = ""
    """What the hostfile that the command names must hold; empty where it names the user's."""
    shape: str
    """How many ranks there are, and on which hosts."""


def plan_start(job: Job, lost: Set[str], trained: bool, new_hostfile: str) -> Start:
    """Return how to start the job without the hosts that are lost.

    Args:
        job: the job.
        lost: names of hosts; at least one other must be left.
        trained: whether steps have been trained that the job can go on from.
        new_hostfile: where the hostfile without those hosts will be.
    """
    command, hostfile, ranks = job.command, "", job.ranks
    fitting: list[str] = []
    if lost:
        left = job.left(lost)
        ranks = fewer_ranks(job.ranks, left)
        command, hostfile = _without(job, lost, new_hostfile, ranks)
        fitting = _fitting_flags(job, lost, ranks)
    own = [*fitting, f"--run-dir={job.run_dir}"]
    # A user's --resume says where the job starts, not where it resumes after a failure.
    if trained or not _is_given("--resume", command.arguments):
        own += ["--resume=auto"]
    return Start(words=command.words + own, hostfile=hostfile, shape=_shape(job, lost, ranks))


def _without(job: Job, lost: Set[str], new_hostfile: str, ranks: int | None) -> tuple[Command, str]:
    """Return the command without some hosts, and the hostfile that it needs."""
    command = job.command
    hostfile = "".join(hostfile_without(text, lost) for text in job.hostfiles.values())
    if hostfile:
        command = command.replaced(HOSTFILES, [new_hostfile])
    lists = [host_list_without(text, lost) for text in command.values(HOST_LISTS)]
    command = command.replaced(HOST_LISTS, lists)
    if command.ranks is not None and ranks is not None:
        command = command.with_ranks(ranks)
    return command, hostfile


def _fitting_flags(job: Job, lost: Set[str], ranks: int | None) -> list[str]:
    """Return the flags that go by ranks, as they suit the smaller job.

    Spares take the places of the ranks that are lost, as far as there are any.
    """
    if job.ranks is None or ranks is None:
        return []
    placed = place_by_slot(job.hosts, job.ranks)
    kept = kept_ranks(placed, lost, ranks)
    flags = []
    if job.emulate_kinds:
        flags.append(f"--emulate-kinds={kinds_of(job.emulate_kinds, kept, job.ranks)}")
    if job.emulate_slowdown:
        flags.append(f"--emulate-slowdown={slowdowns_of(job.emulate_slowdown, kept)}")
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
    """Return names in one line, the first few of many."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
