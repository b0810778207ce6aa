"""Plans a start of the job, given the hosts that are lost. Pure."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight.verdict import count_text, list_names
from kaitian_mpi.supervise.environments import Environments, expand, with_devices
from kaitian_mpi.supervise.hosts import Host, host_list_without, hostfile_without, total_slots
from kaitian_mpi.supervise.hosts_file import hostfile_of
from kaitian_mpi.supervise.mpirun_command import (
    HOST_LISTS,
    HOSTFILES,
    RANKS,
    RUN,
    TRAIN,
    Command,
    MpirunOption,
    is_given,
    parse_launcher,
)
from kaitian_mpi.supervise.remote_hosts import is_own_name

# A value of --emulate-slowdown that slows no rank. Unlike an empty list, it takes precedence over
# the environment variable, whose rank numbers are those of the whole job.
_NO_SLOWDOWN = "0:1"


@dataclass(frozen=True, kw_only=True)
class JobCommand:
    """A job as given on the command line."""

    command: Command
    hosts: tuple[Host, ...]
    """The hosts in hostfiles and host lists, with a slot for each device of their environments, if
    these have devices; empty if there are none, e.g. under a batch system."""
    local: frozenset[str] = frozenset()
    """This machine's names in `hosts`; it is not probed."""
    hostfiles: Mapping[str, str]
    """The content of each hostfile, by the path in the command."""
    config: TrainConfig
    """kaitian-train's settings: with the run folder, the name under which hosts keep snapshots in
    memory between starts, and the emulation, by its flags or by environment variables. For a
    script, only the run folder and the emulation are set."""
    own_flags: int = 0
    """The number of arguments for `kaitian-run` itself; the script and its arguments follow."""
    folder: Path
    """The path of the run folder for this process."""
    job_id: str = ""
    """Set in the environment of this job's ranks, to tell them from those of other jobs."""
    hosts_file: str = ""
    """`--hosts-file`, whose hosts may change while the job runs; it gives one rank per slot."""
    environments: Environments = field(default_factory=dict)
    """The environments of the hosts listed in the file of `--env`."""

    @property
    def ranks(self) -> int | None:
        """The number of ranks of the job with all hosts; None if unknown."""
        if self.hosts_file:
            return total_slots(self.hosts)
        return self.command.ranks or (total_slots(self.hosts) if self.hosts else None)

    @property
    def survives(self) -> bool:
        """Whether mpirun lets the job continue after a rank is lost (`--with-ft ulfm`)."""
        return bool(self.command.values(("with-ft",)))

    @property
    def owns_snapshots(self) -> bool:
        """Whether the snapshots' name was generated here, not given by the user."""
        names_them = is_given("--snapshots", self.command.arguments)
        return self.command.program == TRAIN and not names_them

    @property
    def remote(self) -> list[Host]:
        """The hosts other than this machine, which can be lost."""
        return [host for host in self.hosts if host.name not in self.local]

    def with_hosts(self, hosts: Sequence[Host]) -> JobCommand:
        """Return the job with the current hosts of its hosts file."""
        # Asking a name server could take long while the job runs.
        local = {host.name for host in hosts if is_own_name(host.name)}
        hosts = with_devices(hosts, self.environments)
        hostfiles = {self.hosts_file: hostfile_of(hosts)}
        return replace(self, hosts=tuple(hosts), local=self.local | local, hostfiles=hostfiles)

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


def command_on(command: Command, hosts_file: str) -> Command:
    """Return a command with mpirun's options for the hosts of a hosts file."""
    if not any(part.is_launcher for part in command.parts):
        raise UserError(f"--hosts-file {hosts_file}: the command must start with mpirun")
    for part in command.parts:
        if part.name in (*HOSTFILES, *HOST_LISTS, *RANKS):
            raise UserError(
                f"--hosts-file {hosts_file} cannot be combined with {' '.join(part.words)}: the "
                "file already gives the hosts and one rank per slot; remove one of them"
            )
    begin = next(n for n, part in enumerate(command.parts, start=1) if part.is_launcher)
    options = (  # each start replaces both values
        MpirunOption(("--hostfile", hosts_file), HOSTFILES[0], (hosts_file,)),
        MpirunOption(("-np", "1"), RANKS[0], ("1",)),
    )
    return replace(command, parts=command.parts[:begin] + options + command.parts[begin:])


def interpreter_of(command: Command) -> str:
    """Return the Python interpreter of a command's program; this process's, if it is unknown."""
    words = [word for part in command.parts for word in part.words]
    if PurePath(words[-1]).name in (TRAIN, RUN):
        in_same_folder = Path(words[-1]).with_name("python")
        has_folder = len(in_same_folder.parts) > 1
        is_there = has_folder and in_same_folder.exists()
        python = str(in_same_folder) if is_there else sys.executable
    else:  # python -m kaitian_mpi.cli.train
        python = words[-3]
    # Absolute, because a remote shell starts in another folder.
    return os.path.abspath(python) if "/" in python else python


def plan_start(job: JobCommand, lost: Set[str], trained: bool, new_hostfile: str) -> Start:
    """Plan a start of the job without the lost hosts.

    `trained` says whether an earlier start has begun to train. `new_hostfile` is the path to which
    the caller writes the hostfile's content.
    """
    command = job.command
    hostfile = ""
    ranks = job.ranks
    left = job.left(lost)
    added_flags: list[str] = []
    if lost or job.hosts_file:
        slots = total_slots(left)
        ranks = ranks if ranks is None or slots is None else min(ranks, slots)
        command, hostfile = _without(job, lost, new_hostfile, ranks)
        added_flags += _adapted_flags(job, ranks)
    if command.program == TRAIN:
        added_flags += [f"--run-dir={job.config.run_dir}"]
        # A user's --resume applies to the first start, not to a restart after a failure.
        if trained or not is_given("--resume", command.arguments):
            added_flags += ["--resume=auto"]
        words = command.words + added_flags
    else:  # a script resumes by itself; the words after it are its own arguments
        own_arguments = command.arguments[: job.own_flags]
        script_arguments = command.arguments[job.own_flags :]
        arguments = (*own_arguments, *added_flags, *script_arguments)
        words = replace(command, arguments=arguments).words
    if job.environments:
        names = {host.name for host in left} or job.environments.keys()
        environments = {name: job.environments[name] for name in job.environments if name in names}
        words, _ = expand(parse_launcher(words), left, environments)
    count = "" if ranks is None else count_text(ranks, "rank")
    host_names = list_names([host.name for host in left])
    shape = " on ".join(filter(None, [count, host_names])) or "as mpirun chooses"
    return Start(words=words, hostfile=hostfile, shape=shape)


def _without(
    job: JobCommand, lost: Set[str], new_hostfile: str, ranks: int | None
) -> tuple[Command, str]:
    """Return the command without some hosts, and the content of the hostfile it needs."""
    command = job.command
    hostfile = "".join(hostfile_without(text, lost) for text in job.hostfiles.values())
    if hostfile:
        command = command.replaced(HOSTFILES, [new_hostfile])
    lists = [host_list_without(text, lost) for text in command.values(HOST_LISTS)]
    command = command.replaced(HOST_LISTS, lists)
    if command.ranks is not None and ranks is not None:
        command = command.replaced(RANKS, [str(ranks)])
    return command, hostfile


def _adapted_flags(job: JobCommand, ranks: int | None) -> list[str]:
    """Return the flags whose values depend on the ranks, for a job of `ranks` ranks.

    They get the first of the emulated devices. Spares take the place of lost ranks, so as many
    fewer are left.
    """
    if job.ranks is None or ranks is None:
        return []
    config = job.config
    flags = []
    if config.emulate_kinds:
        kinds = config.emulate_kinds.split(",")[:ranks]
        flags.append(f"--emulate-kinds={','.join(kinds)}")
    if config.emulate_slowdown:
        entries = [entry.strip() for entry in config.emulate_slowdown.split(",")]
        present = {str(rank) for rank in range(ranks)}
        entries = [entry for entry in entries if entry.partition(":")[0] in present]
        flags.append(f"--emulate-slowdown={','.join(entries) or _NO_SLOWDOWN}")
    if config.spares:
        flags.append(f"--spares={max(0, config.spares - (job.ranks - ranks))}")
    return flags
