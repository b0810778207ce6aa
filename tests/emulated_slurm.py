"""Slurm on emulated hosts: a real controller, and a real node daemon on each host.

Needs root, and Debian's slurmctld, slurmd, slurm-client and munge, or what is the same elsewhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from shared.emulated_hosts import EmulatedHosts, unless_required
from shared.emulated_hosts import why_not as why_no_hosts

_NEEDED = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
_STARTING_SEC = 20.0
_BINDING = "task/affinity\nTaskPluginParam=autobind=cores"
_CONFIG = """\
ClusterName=test
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits for as long as a credential lives; 2 minutes by default.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin={binding}
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
InactiveLimit=0
KillWait=10
MinJobAge=300
PlugStackConfig={folder}/plugstack.conf
# Its PMIx plugin keeps its sockets there: the hosts share one file system.
TmpFS={folder}/tmp-%n
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP
"""


def why_not() -> str:
    """Return why Slurm cannot be emulated here; nothing where it can."""
    if reason := why_no_hosts():
        return reason
    missing = [name for name in _NEEDED if not shutil.which(name, path=_path())]
    return f"needs {', '.join(missing)}" if missing else ""


def reason_to_skip() -> str:
    """Return why tests on Slurm are skipped; nothing where they may not be.

    In CI, `KAITIAN_TEST_SLURM=required` has them fail where Slurm is not installed.
    """
    return unless_required("KAITIAN_TEST_SLURM", "Slurm", why_not())


def has_pmix() -> bool:
    """Return whether Slurm's PMIx plugin finds the library that it loads."""
    folders = Path("/usr/lib").glob("*/pmix2/lib/libpmix.so")
    return any(True for _ in folders)


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin"  # where the daemons are


class EmulatedSlurm:
    """A Slurm whose nodes are emulated hosts, which end its processes; gone when the context is.

    Each node is said to have so many slots (CPUs), and a feature, for `--constraint`. Where it
    binds tasks to their cores, the machine must have them.
    """

    def __init__(
        self, folder: Path, hosts: EmulatedHosts, slots: Sequence[int],
        features: Sequence[str] = (), *, binds: bool = False,
    ) -> None:  # fmt: skip
        self._folder, self.hosts, self._binds = folder, hosts, binds
        self._slots, self._features = slots, features
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Self:
        self._write_settings()
        try:
            self._start_munge()
            self._start("slurmctld", "-D", "-c", on=1)
            for number in range(1, len(self._slots) + 1):
                self._start("slurmd", "-D", "-N", self.hosts.name(number), on=number)
            self._wait_for_nodes()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs a command on the first node."""
        return self.hosts.on_first(*words)

    def address(self, number: int) -> str:
        """Return a node's address, numbered from 1."""
        return self.hosts.address(number)

    def ask(self, *words: str) -> str:
        """Return what one of Slurm's commands prints; raise RuntimeError if it fails."""
        options = {"env": {**os.environ, **self.environment}, "stdin": subprocess.DEVNULL}
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, check=False, **options
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
        return done.stdout

    def _write_settings(self) -> None:
        for name in ("munge", "state"):
            (self._folder / name).mkdir()
        nodes = []
        for number, count in enumerate(self._slots, 1):
            name = self.hosts.name(number)
            for folder in (name, f"tmp-{name}"):
                (self._folder / folder).mkdir()
            line = f"NodeName={name} NodeAddr={self.hosts.address(number)} CPUs={count}"
            if self._features:
                line += f" Feature={self._features[number - 1]}"
            nodes.append(f"{line} RealMemory=1000 State=UNKNOWN")
        config = _CONFIG.format(
            first=self.hosts.name(1),
            address=self.hosts.address(1),
            folder=self._folder,
            nodes="\n".join(nodes),
            binding=_BINDING if self._binds else "task/none",
        )
        (self._folder / "slurm.conf").write_text(config)
        (self._folder / "plugstack.conf").write_text("")
        # Unused, but where `ip netns exec` hides the mount points, looking for the version fails.
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self._folder / "munge/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)

    def _start_munge(self) -> None:
        folder = self._folder / "munge"
        files = [f"--{name}={folder}/{name}" for name in ("socket", "pid-file", "log-file")]
        files += [f"--key-file={folder}/key", f"--seed-file={folder}/seed"]
        # It would refuse a socket in a folder that others cannot enter, as they need not.
        self._start("munged", "--foreground", "--force", *files, on=1)
        self._wait_until((folder / "socket").exists, "munged has no socket")

    def _start(self, *words: str, on: int) -> None:
        command = self.hosts.on(on, str(shutil.which(words[0], path=_path())), *words[1:])
        options = {"env": {**os.environ, **self.environment}, "stdin": subprocess.DEVNULL}
        with (self._folder / "daemons.log").open("ab") as log:
            self._daemons.append(subprocess.Popen(command, stdout=log, stderr=log, **options))

    def _wait_for_nodes(self) -> None:
        def all_idle() -> bool:
            try:
                states = self.ask("sinfo", "--noheader", "--Node", "--format=%t").split()
            except RuntimeError:  # the controller is not up yet
                return False
            return states == ["idle"] * len(self._slots)

        self._wait_until(all_idle, "not all nodes are up")

    def _wait_until(self, is_true, problem: str) -> None:
        deadline = time.monotonic() + _STARTING_SEC
        while not is_true():
            if time.monotonic() > deadline:
                logs = [path.read_text() for path in sorted(self._folder.glob("*.log"))]
                raise TimeoutError("\n".join([f"Slurm: {problem}", *logs]))
            time.sleep(0.1)

    def _stop(self) -> None:
        """End the daemons; what runs on the nodes ends with the hosts."""
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()


@contextmanager
def slurm_on_hosts(
    folder: Path, slots: Sequence[int], cpus: Sequence[int], features: Sequence[str],
    **options: bool,
) -> Iterator[EmulatedSlurm]:  # fmt: skip
    """Yield a Slurm on hosts of its own; see `EmulatedSlurm`."""
    for name in ("hosts", "slurm"):
        (folder / name).mkdir()
    with (
        EmulatedHosts(folder / "hosts", slots) as hosts,
        EmulatedSlurm(folder / "slurm", hosts, cpus, features, **options) as slurm,
    ):
        yield slurm
