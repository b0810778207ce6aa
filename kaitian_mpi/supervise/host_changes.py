"""Decides when a running job should be started again because its hosts have changed."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kaitian_mpi.runtime.hosts import Host
from kaitian_mpi.supervise.host_check import PendingAnswer
from kaitian_mpi.supervise.hosts_file import HostsFile

_MAX_BACKOFF_SEC = 3600.0


class HostChanges:
    """Which hosts of the hosts file the job should be on, and whether it is.

    At first, all. One that is lost comes back once it has answered, not before its back-off has
    passed; one that is new in the file joins once it has answered. Times are in seconds of one
    clock.

    Args:
        file: the hosts file.
        ask: starts asking a host whether ranks can be started there.
        report: logs a line.
        backoff_sec: how long a host is held back after its first loss, and at most an hour twice as
            long after each further one; also the time between two questions to a host.
    """

    def __init__(
        self,
        file: HostsFile,
        ask: Callable[[Host], PendingAnswer],
        report: Callable[[str], None],
        backoff_sec: float,
    ) -> None:
        self._file, self._ask, self._report, self._every_sec = file, ask, report, backoff_sec
        self._ready = {host.name for host in file.hosts}
        self._members: dict[str, Host] = {}
        self._losses: dict[str, int] = {}
        self._pending: dict[str, PendingAnswer] = {}
        self._ask_at: dict[str, float] = {}
        self._faults: dict[str, str] = {}
        self._is_warned = False

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All hosts of the file, in an order in which none changes its place."""
        return self._file.hosts

    @property
    def left_out(self) -> frozenset[str]:
        """The hosts of the file that the job is not to be started on."""
        return frozenset(host.name for host in self.hosts) - self._ready

    @property
    def wanted(self) -> list[Host]:
        """The hosts that the job is to be started on."""
        return [host for host in self.hosts if host.name in self._ready]

    def begin(self) -> None:
        """Record that the job is started on the hosts in `wanted`."""
        self._members = {host.name: host for host in self.wanted}
        self._is_warned = False

    def lose(self, names: Collection[str], now: float, why: str) -> None:
        """Hold hosts back that were lost, or that the job could not be started on.

        Args:
            names: the hosts.
            now: the time.
            why: for the message, after the host's name.
        """
        for name in sorted(names):
            self._ready.discard(name)
            seconds = self._every_sec * 2.0 ** min(self._losses.get(name, 0), 64)
            seconds = min(seconds, max(_MAX_BACKOFF_SEC, self._every_sec))
            self._losses[name] = self._losses.get(name, 0) + 1
            self._ask_at[name] = now + seconds
            self._report(f"host {name} {why}; it can come back in {seconds:.0f} s at the earliest")

    def poll(self, now: float) -> bool:
        """Check for changes, without blocking; return whether to start the job again."""
        self._file.poll(now)
        self._forget_removed()
        for host in self.hosts:
            is_due = now >= self._ask_at.get(host.name, now)
            if host.name not in self._ready | self._pending.keys() and is_due:
                self._pending[host.name] = self._ask(host)
        self._read_answers(now)
        # Hosts that are added together join together.
        wanted = {host.name: host for host in self.wanted}
        if self._pending or wanted == self._members:
            return False
        if wanted.keys() & self._members:
            return True
        if not self._is_warned:
            self._is_warned = True
            self._report(
                f"{self._file.path} keeps none of the job's hosts, which have the state; until it "
                "does the hosts stay as they are"
            )
        return False

    def close(self) -> None:
        """Stop asking."""
        while self._pending:
            self._pending.popitem()[1].cancel()

    def _forget_removed(self) -> None:
        names = {host.name for host in self.hosts}
        self._ready &= names
        for name in self._pending.keys() - names:
            self._pending.pop(name).cancel()
        for known in (self._ask_at, self._faults):  # one that is added again is asked at once
            for name in known.keys() - names:
                del known[name]

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
                self._report(f"{answer.fault}; until then the job does without {name}")
            self._faults[name] = answer.fault
            self._ask_at[name] = now + self._every_sec
