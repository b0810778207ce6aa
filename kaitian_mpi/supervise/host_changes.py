"""Decides when a running job should be started again because its hosts have changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kaitian_mpi.runtime.hosts import Host
from kaitian_mpi.supervise.host_check import PendingAnswer, version_faults
from kaitian_mpi.supervise.hosts_file import HostEntry, HostsFile

_MAX_BACKOFF_SEC = 3600.0


class Backoff:
    """Holds a host back after each loss, twice as long as after the one before, at most an hour.

    A host that was not lost for an hour counts as new.
    """

    def __init__(self, first_sec: float) -> None:
        """Hold no host back.

        Args:
            first_sec: how long a host is held back after its first loss.
        """
        self._first_sec = first_sec
        self._max_sec = max(_MAX_BACKOFF_SEC, first_sec)
        self._losses: dict[str, int] = {}
        self._free_since: dict[str, float] = {}
        self._held: set[str] = set()

    def lose(self, name: str, now: float) -> float:
        """Record a loss; return for how many seconds the host is held back."""
        if now - self._free_since.get(name, now) > self._max_sec:
            self._losses[name] = 0
        losses = self._losses[name] = self._losses.get(name, 0) + 1
        seconds = min(self._first_sec * 2.0 ** min(losses - 1, 64), self._max_sec)
        self._free_since[name] = now + seconds
        self._held.add(name)
        return seconds

    def is_held(self, name: str, now: float) -> bool:
        """Return whether a host is held back."""
        return name in self._held and now < self._free_since[name]

    def clear(self) -> None:
        """Hold no host back until its next loss."""
        self._held.clear()


class HostChanges:
    """Which hosts of the hosts file the job should be on, and whether it is.

    At first, all. One that is lost comes back once it has answered, not before its back-off has
    passed; one that is new in the file joins once it has answered. Times are in seconds of one
    clock.
    """

    def __init__(
        self,
        file: HostsFile,
        ask: Callable[[Host], PendingAnswer],
        report: Callable[[str], None],
        version: str,
        backoff_sec: float,
    ) -> None:
        """Start with all hosts of the file.

        Args:
            file: the hosts file.
            ask: starts asking a host whether ranks can be started there.
            report: logs a line.
            version: of this package here.
            backoff_sec: after a host's first loss, and between two questions to it.
        """
        self._file, self._ask, self._report = file, ask, report
        self._version, self._every_sec = version, backoff_sec
        self._backoff = Backoff(backoff_sec)
        self._ready = {entry.host.name for entry in file.entries}
        self._members: dict[str, Host] = {}
        self._impaired: set[str] = set()
        self._pending: dict[str, PendingAnswer] = {}
        self._ask_at: dict[str, float] = {}
        self._faults: dict[str, str] = {}
        self._is_reread = self._is_warned = False

    @property
    def entries(self) -> tuple[HostEntry, ...]:
        """All hosts of the file, in an order in which none changes its place."""
        return self._file.entries

    @property
    def left_out(self) -> frozenset[str]:
        """The hosts of the file that the job is not to be started on."""
        return frozenset(entry.host.name for entry in self.entries) - self._ready

    @property
    def wanted(self) -> list[Host]:
        """The hosts that the job is to be started on."""
        return [entry.host for entry in self.entries if entry.host.name in self._ready]

    def begin(self) -> None:
        """Record that the job is started on the hosts in `wanted`."""
        self._members = {host.name: host for host in self.wanted}
        self._impaired.clear()
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
            self._impaired.add(name)
            seconds = self._backoff.lose(name, now)
            self._ask_at[name] = now
            self._report(f"host {name} {why}; it can come back in {seconds:.0f} s at the earliest")

    def read_again(self) -> None:
        """Have the next `poll` read the file, and ask every host that is not in the job."""
        self._is_reread = True
        self._backoff.clear()
        self._ask_at.clear()
        self._faults.clear()

    def poll(self, now: float) -> bool:
        """Check for changes, without blocking; return whether to start the job again."""
        self._file.poll(now, at_once=self._is_reread)
        self._is_reread = False
        self._forget_removed()
        self._ask_hosts(now)
        self._read_answers(now)
        # Hosts that are added together join together.
        return not self._pending and self._is_better_elsewhere()

    def close(self) -> None:
        """Stop asking."""
        while self._pending:
            self._pending.popitem()[1].cancel()

    def _forget_removed(self) -> None:
        names = {entry.host.name for entry in self.entries}
        self._ready &= names
        for name in self._pending.keys() - names:
            self._pending.pop(name).cancel()
        for known in (self._ask_at, self._faults):  # one that is added again is asked at once
            for name in known.keys() - names:
                del known[name]

    def _ask_hosts(self, now: float) -> None:
        for entry in self.entries:
            name = entry.host.name
            is_due = now >= self._ask_at.get(name, now) and not self._backoff.is_held(name, now)
            if name not in self._ready and name not in self._pending and is_due:
                self._pending[name] = self._ask(entry.host)

    def _read_answers(self, now: float) -> None:
        for name, asked in list(self._pending.items()):
            answer = asked.poll()
            if answer is None:
                continue
            del self._pending[name]
            fault = answer.fault or "".join(version_faults({name: answer}, self._version))
            if not fault:
                self._ready.add(name)
                self._report(f"host {name} is ready to join")
            elif fault != self._faults.get(name):
                self._report(f"{fault}; until then the job does without {name}")
            self._faults[name] = fault
            self._ask_at[name] = now + self._every_sec

    def _is_better_elsewhere(self) -> bool:
        wanted = self.wanted
        joining = [host.name for host in wanted if not self._has(host)]
        listed = {entry.host.name for entry in self.entries}
        leaving = [name for name in self._members if name not in listed]
        if not (joining or leaving):
            return False
        if any(host.name in self._members for host in wanted):
            return True
        if not self._is_warned:
            self._is_warned = True
            names = ", ".join(self._members)
            self._report(
                f"{self._file.path} keeps none of the job's hosts ({names}), which have the state; "
                "keep at least one; until then the hosts stay as they are"
            )
        return False

    def _has(self, host: Host) -> bool:
        """Return whether the job has all of a host's ranks."""
        member = self._members.get(host.name)
        is_whole = member is not None and member.slots == host.slots
        return is_whole and host.name not in self._impaired


def joined_hosts(wanted: Sequence[Host], trained_on: Collection[str] | None) -> list[Host]:
    """Return the hosts that are new since the last start that trained; none without such a one."""
    return [] if trained_on is None else [host for host in wanted if host.name not in trained_on]
