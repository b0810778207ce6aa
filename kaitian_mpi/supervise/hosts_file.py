"""Follows `--hosts-file`, the list of hosts that a supervised job should run on."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Sequence

from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight.limited_process import MAX_AT_ONCE
from kaitian_mpi.supervise.hosts import Host, parse_hostfile
from kaitian_mpi.supervise.remote_hosts import PendingAnswer

_MAX_BYTES = 1 << 20
_MAX_BACKOFF_SEC = 3600.0
_SETTLE_SEC = 2.0  # longer than an editor takes to write a file


def read_hosts_file(path: str) -> str:
    """Return the file's content."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"--hosts-file {path} is not a regular file; name one")
            writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if status.st_uid not in (os.geteuid(), 0) or writable:
                raise UserError(
                    f"--hosts-file {path}: another user can write it, and ranks are started on its "
                    "hosts; make it your own, and chmod go-w"
                )
            return file.read(_MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        fault = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(
            f"--hosts-file {path}: {fault}; name a text file that can be read"
        ) from error


def parse_hosts(text: str, path: str) -> tuple[Host, ...]:
    """Parse the file's content: an mpirun hostfile that gives every host's slots."""
    hosts = parse_hostfile(text, f"--hosts-file {path}")
    for host in hosts:
        if host.slots is None:
            raise UserError(
                f"--hosts-file {path}: {host.name} has no slots; write its number of ranks: "
                f"{host.name} slots=N"
            )
    usable = tuple(host for host in hosts if host.slots)
    if not usable:
        raise UserError(f"--hosts-file {path} has no host with slots; add at least one")
    return usable


def hostfile_of(hosts: Iterable[Host]) -> str:
    """Return the content of a hostfile with these hosts."""
    lines = []
    for host in hosts:
        login = f"{host.user}@" if host.user else ""
        port = f" port={host.port}" if host.port else ""
        lines.append(f"{login}{host.name} slots={host.slots}{port}\n")
    return "".join(lines)


def in_stable_order(hosts: Sequence[Host], before: Iterable[Host]) -> tuple[Host, ...]:
    """Return hosts in their previous order, with new hosts last.

    This keeps the ranks in place, and the host with the run folder first.
    """
    place_before = {host.name: number for number, host in enumerate(before)}
    return tuple(sorted(hosts, key=lambda host: place_before.get(host.name, len(place_before))))


class HostsFile:
    """The hosts in the file, as of its last usable content that did not change for 2 s."""

    def __init__(
        self, path: str, report: Callable[[str], None], read: Callable[[str], str] = read_hosts_file
    ) -> None:
        self.path = path
        self._read = read
        self._report = report
        self.hosts = parse_hosts(read(path), path)
        """The hosts, in a stable order (`in_stable_order`)."""
        # The hosts, or the reason why the file cannot be used.
        self._seen: tuple[Host, ...] | str = self.hosts
        self._checked: tuple[Host, ...] | str = self.hosts
        self._since = 0.0

    def poll(self, now: float) -> None:
        """Read the file again; `now` is in seconds of a clock.

        A file that cannot be used is reported once; until it is corrected, the old hosts stay.
        """
        content: tuple[Host, ...] | str
        try:
            content = in_stable_order(parse_hosts(self._read(self.path), self.path), self.hosts)
        except UserError as error:
            content = str(error)
        if content != self._seen:
            self._seen = content
            self._since = now
        if content == self._checked or now - self._since < _SETTLE_SEC:
            return
        self._checked = content
        if isinstance(content, str):
            self._report(f"{content}; until then, the previous hosts are kept")
        elif content != self.hosts:
            self.hosts = content
            shown = ", ".join(hostfile_of(content).splitlines())
            self._report(f"{self.path} has changed: {shown}")


class HostChanges:
    """Tracks which hosts of the hosts file the job should run on.

    At first, these are all hosts. A new host joins once it has answered. A lost host rejoins once
    it has answered after its back-off time, which doubles with each loss, up to an hour.
    `backoff_sec` is also the time between two questions to a host. Times are in seconds of one
    clock.
    """

    def __init__(
        self,
        file: HostsFile,
        ask: Callable[[Host], PendingAnswer],
        report: Callable[[str], None],
        backoff_sec: float,
    ) -> None:
        self.file = file
        self._ask = ask
        self._report = report
        self._every_sec = backoff_sec
        self._ready = {host.name for host in file.hosts}
        self._members: dict[str, Host] = {}
        self._losses: dict[str, int] = {}
        self._pending: dict[str, PendingAnswer] = {}
        self._ask_at: dict[str, float] = {}
        self._faults: dict[str, str] = {}
        self._is_warned = False

    @property
    def left_out(self) -> frozenset[str]:
        """The hosts of the file that the job is not to be started on."""
        return frozenset(host.name for host in self.file.hosts) - self._ready

    @property
    def wanted(self) -> list[Host]:
        """The hosts that the job is to be started on."""
        return [host for host in self.file.hosts if host.name in self._ready]

    def begin(self) -> None:
        """Record that the job is started on the hosts in `wanted`."""
        self._members = {host.name: host for host in self.wanted}
        self._is_warned = False

    def lose(self, names: Collection[str], now: float, why: str) -> None:
        """Exclude hosts for a while that were lost, or on which the job could not be started."""
        for name in sorted(names):
            self._ready.discard(name)
            seconds = self._every_sec * 2.0 ** min(self._losses.get(name, 0), 64)
            seconds = min(seconds, max(_MAX_BACKOFF_SEC, self._every_sec))
            self._losses[name] = self._losses.get(name, 0) + 1
            self._ask_at[name] = now + seconds
            self._report(f"host {name} {why}; it can rejoin in {seconds:.0f} s at the earliest")

    def poll(self, now: float) -> bool:
        """Check for changes, without blocking; return whether to start the job again."""
        self.file.poll(now)
        self._forget_removed()
        for host in self.file.hosts:
            is_due = now >= self._ask_at.get(host.name, now)
            is_free = len(self._pending) < MAX_AT_ONCE
            if host.name not in self._ready | self._pending.keys() and is_due and is_free:
                self._pending[host.name] = self._ask(host)
        self._read_answers(now)
        # Hosts that are added together join together.
        wanted_hosts = {host.name: host for host in self.wanted}
        if self._pending or wanted_hosts == self._members:
            return False
        if wanted_hosts.keys() & self._members:
            return True
        if not self._is_warned:
            self._is_warned = True
            self._report(
                f"{self.file.path} lists none of the job's current hosts, which have the training "
                "state; keep at least one of them; until then, the job stays on its current hosts"
            )
        return False

    def close(self) -> None:
        """Stop asking."""
        while self._pending:
            self._pending.popitem()[1].cancel()

    def _forget_removed(self) -> None:
        names = {host.name for host in self.file.hosts}
        self._ready &= names
        for name in self._pending.keys() - names:
            self._pending.pop(name).cancel()
        for by_host in (self._ask_at, self._faults):  # a host that is added again is asked at once
            for name in by_host.keys() - names:
                del by_host[name]

    def _read_answers(self, now: float) -> None:
        for name, asked in list(self._pending.items()):
            answer = asked.poll()
            if answer is None:
                continue
            del self._pending[name]
            if not answer.fault:
                self._ready.add(name)
                self._report(f"host {name} is ready to join")
            elif answer.fault != self._faults.get(name):
                self._report(f"{answer.fault}; until then, the job runs without {name}")
            self._faults[name] = answer.fault
            self._ask_at[name] = now + self._every_sec
