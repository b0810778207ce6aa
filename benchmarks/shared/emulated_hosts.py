"""Hosts of this machine's own making: network namespaces, joined by a bridge, an sshd in each.

They share its memory, files and process numbers, and take turns at its cores; each has a name, an
address and a link of its own, so that mpirun reaches them over real ssh and ranks talk over real
sockets. Their processes are in one cgroup, in which Linux divides the cores among processes, not
among sessions (`sched_autogroup_enabled`), as it does where ssh starts one for each host: then a
daemon was seen without a core for a minute, next to a rank of another session that yields its own
in order to wait for it. Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from shared.processes import rank_of

_SSHD = "/usr/sbin/sshd"
_LIMIT_SEC = 10.0
# What mpirun of Open MPI 5 and of Open MPI 4 calls for ssh.
_SSH = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent")
_MPICH_SSH = "HYDRA_LAUNCHER_EXEC"  # the same of MPICH's, without arguments
_POLICY = "PRTE_MCA_rmaps_default_mapping_policy"  # `:oversubscribe` contradicts a host file
_GROUPS = Path("/sys/fs/cgroup")


def why_not() -> str:
    """Return why hosts cannot be emulated here; nothing where they can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    missing = [
        name for name in ("ip", "unshare", "taskset", "ssh", "ssh-keygen") if not shutil.which(name)
    ]
    missing += [] if os.path.exists(_SSHD) else [_SSHD]
    if missing:
        return f"needs {', '.join(missing)}"
    trial = f"kt{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", trial], capture_output=True, check=False).returncode:
        return "needs the right to make network namespaces"
    run("ip", "netns", "del", trial)
    return ""


def reason_to_skip() -> str:
    """Return why tests on emulated hosts are skipped; nothing where they may not be.

    In CI, `KAITIAN_TEST_HOSTS=required` has them fail where hosts cannot be emulated.
    """
    return unless_required("KAITIAN_TEST_HOSTS", "emulated hosts", why_not())


def unless_required(variable: str, what: str, reason: str) -> str:
    """Return why tests are skipped; nothing where an environment variable is `required`."""
    required = os.environ.get(variable) == "required"
    return f"{what}: {reason}" if reason and not required else ""


def run(*words: object) -> None:
    """Run a command, which has to succeed."""
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


def share_cores(cores: Sequence[int], slots: Sequence[int]) -> list[list[int]]:
    """Return each host's cores: its own, or where there are too few, those with fewest ranks."""
    if len(cores) >= len(slots):
        return [list(cores[number :: len(slots)]) for number in range(len(slots))]
    ranks = dict.fromkeys(cores, 0)
    chosen: dict[int, int] = {}
    for number in sorted(range(len(slots)), key=lambda number: -slots[number]):
        chosen[number] = min(cores, key=lambda core: ranks[core])
        ranks[chosen[number]] += slots[number]
    return [[chosen[number]] for number in range(len(slots))]


def _parent_of_groups() -> Path | None:
    """Return where a cgroup can be made that gets a share of the cores, if anywhere."""
    if (_GROUPS / "cpu" / "cgroup.procs").exists():  # version 1
        return _GROUPS / "cpu"
    enabled = _GROUPS / "cgroup.subtree_control"  # version 2
    return _GROUPS if enabled.exists() and "cpu" in enabled.read_text().split() else None


class EmulatedHosts:
    """Some hosts, numbered from 1, each for so many ranks; they are gone when the context is left.

    The folder, an empty one, is for keys and settings.
    """

    def __init__(self, folder: Path, slots: Sequence[int]) -> None:
        self.hostfile = folder / "hosts.txt"
        self.mpich_hostfile = folder / "hosts-of-mpich.txt"
        self._folder = folder
        self._tag = f"kt{os.getpid()}"
        self._subnet = f"10.77.{os.getpid() % 256}"
        self.slots = sum(slots)
        self._numbers = range(1, len(slots) + 1)
        self.others = self._numbers[1:]
        self._cores = share_cores(sorted(os.sched_getaffinity(0)), slots)
        self._servers: dict[int, subprocess.Popen[bytes]] = {}
        self._group: Path | None = None
        taken = {self.address(n): k for n, k in zip(self._numbers, slots, strict=True)}
        self.hostfile.write_text("".join(f"{host} slots={k}\n" for host, k in taken.items()))
        self.mpich_hostfile.write_text("".join(f"{host}:{k}\n" for host, k in taken.items()))

    def __enter__(self) -> Self:
        if reason := why_not():
            raise RuntimeError(f"hosts cannot be emulated here: {reason}")
        os.makedirs("/run/sshd", exist_ok=True)  # where sshd drops its rights
        for name in ("key", "hostkey"):
            if not (self._folder / name).exists():
                run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._folder / name)
        (self._folder / "sshd_config").write_text(
            f"HostKey {self._folder}/hostkey\nAuthorizedKeysFile {self._folder}/key.pub\n"
            "StrictModes no\nPidFile none\nUsePAM no\n"
        )
        (self._folder / "ssh_config").write_text(
            f"Host *\n  IdentityFile {self._folder}/key\n  StrictHostKeyChecking no\n"
            "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        agent = self._folder / "ssh"
        agent.write_text(f'#!/bin/sh\nexec ssh -F {self._folder}/ssh_config "$@"\n')
        agent.chmod(0o700)
        try:
            self._make_group()
            run("ip", "link", "add", self._tag, "type", "bridge")
            run("ip", "link", "set", self._tag, "up")
            for number in self._numbers:
                self._start(number)
            for number in self._numbers:
                self._wait_for(number)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    @property
    def have_group(self) -> bool:
        """Whether their processes are in one cgroup."""
        return self._group is not None

    def address(self, number: int) -> str:
        """Return a host's address."""
        return f"{self._subnet}.{number}"

    def name(self, number: int) -> str:
        """Return a host's name."""
        return f"host{number}"

    def on_first(self, *words: str) -> list[str]:
        """Return the command that runs this one on the first host."""
        return self.on(1, *words)

    def on(self, number: int, *words: str) -> list[str]:
        """Return the command line that runs a command on a host."""
        bind = ("taskset", "--cpu-list", ",".join(map(str, self._cores[number - 1])))
        enter = ("ip", "netns", "exec", self._namespace(number), "unshare", "--uts", "sh", "-c")
        ssh = " ".join(f"{name}='ssh -F {self._folder}/ssh_config'" for name in _SSH)
        agents = f"{ssh} {_MPICH_SSH}={self._folder}/ssh"
        settings = f"unset {_POLICY}; export {agents}"
        script = f'hostname "$0"; {settings}; exec "$@"'
        return [*self._join_group(), *bind, *enter, script, self.name(number), *words]

    def rank_pids(self) -> dict[int, int]:
        """Return the processes of the ranks that live on any host, by world rank."""
        found: dict[int, int] = {}
        for pid in sorted(pid for number in self._numbers for pid in self._processes(number)):
            rank = rank_of(pid)
            if rank is not None:
                found.setdefault(rank, pid)  # a rank's own children are younger
        return found

    def kill(self, number: int) -> None:
        """Let a host be as if its power were gone."""
        self.unplug(number)
        self._kill_processes(number)

    def revive(self, number: int) -> None:
        """Let a host that was killed be as if it had started again."""
        self._servers[number].wait()
        run("ip", "link", "set", self._link(number), "up")
        self._serve(number)

    def unplug(self, number: int) -> None:
        """Take a host's link down; its processes live."""
        run("ip", "link", "set", self._link(number), "down")

    @contextmanager
    def preferred(self) -> Iterator[None]:
        """Give their processes the cores before others, as a limit on their time needs.

        mpirun gives a rank 0.25 s at a signal, and the doctor a host 8 s to answer.
        """
        for name, most in (("cpu.shares", "262144"), ("cpu.weight", "10000")):  # of versions 1, 2
            if self._group and (path := self._group / name).exists():
                before = path.read_text()
                path.write_text(most)
                yield
                path.write_text(before)
                return
        yield

    def _make_group(self) -> None:
        if parent := _parent_of_groups():
            group = parent / self._tag
            with suppress(OSError):  # not the right to
                group.mkdir()
                self._group = group

    def _join_group(self) -> tuple[str, ...]:
        """Return the words before a command that move it to the group."""
        if self._group is None:
            return ()
        return ("sh", "-c", 'echo 0 > "$0"; exec "$@"', str(self._group / "cgroup.procs"))

    def _remove_group(self) -> None:
        deadline = time.monotonic() + _LIMIT_SEC
        while self._group is not None:
            try:
                self._group.rmdir()
                self._group = None
            except OSError:  # a process is still in it
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _namespace(self, number: int) -> str:
        return f"{self._tag}n{number}"

    def _link(self, number: int) -> str:
        return f"{self._tag}v{number}"

    def _start(self, number: int) -> None:
        namespace, link = self._namespace(number), self._link(number)
        inside = ("ip", "-n", namespace)
        run("ip", "netns", "add", namespace)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        run("ip", "link", "set", link, "master", self._tag, "up")
        run(*inside, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        run(*inside, "link", "set", "lo", "up")
        self._serve(number)

    def _serve(self, number: int) -> None:
        self._servers[number] = subprocess.Popen(
            self.on(number, _SSHD, "-D", "-f", f"{self._folder}/sshd_config"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _wait_for(self, number: int) -> None:
        login = ("ssh", "-F", f"{self._folder}/ssh_config", self.address(number), "true")
        deadline = time.monotonic() + _LIMIT_SEC
        while True:
            done = subprocess.run(self.on_first(*login), capture_output=True, check=False)
            if not done.returncode:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"no login on {self.name(number)}: {done.stderr.decode()}")
            time.sleep(0.1)

    def _processes(self, number: int) -> list[int]:
        found = []
        with suppress(OSError):
            inode = os.stat(f"/run/netns/{self._namespace(number)}").st_ino
            for folder in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):  # it has ended
                    if os.stat(folder / "ns" / "net").st_ino == inode:
                        found.append(int(folder.name))
        return found

    def _kill_processes(self, number: int) -> None:
        for pid in self._processes(number):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _remove(self) -> None:
        for number in self._numbers:
            self._kill_processes(number)
            link = ("ip", "link", "del", self._link(number))
            subprocess.run(link, capture_output=True, check=False)
        while self._servers:
            number, server = self._servers.popitem()
            server.wait()
            run("ip", "netns", "del", self._namespace(number))
        subprocess.run(["ip", "link", "del", self._tag], capture_output=True, check=False)
        self._remove_group()
