"""`--hosts-file`: which hosts a supervised job should have, read again while it runs."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.hosts import Host, parse_hostfile

_MAX_BYTES = 1 << 20
_SETTLE_SEC = 2.0  # longer than an editor takes to write a file


@dataclass(frozen=True)
class HostEntry:
    """A host with the line that mpirun's hostfile gets for it."""

    host: Host
    line: str


def read_hosts_file(path: str) -> str:
    """Return the file's content.

    Raises:
        UserError: it cannot be read, or another user could have written it.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise UserError(f"--hosts-file {path} is not a regular file; name one")
            if about.st_uid not in (os.geteuid(), 0) or about.st_mode & stat.S_IWOTH:
                raise UserError(
                    f"--hosts-file {path}: another user can write it, and ranks are started on its "
                    "hosts; make it your own, and chmod o-w"
                )
            return file.read(_MAX_BYTES).decode()
    except OSError as error:
        raise UserError(
            f"--hosts-file {path}: {error.strerror}; name a file that can be read"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"--hosts-file {path} is not UTF-8 text; write lines such as 'node-a slots=4'"
        ) from error


def parse_hosts(text: str, path: str) -> tuple[HostEntry, ...]:
    """Parse the file's content: a hostfile of mpirun's with each host once and with its slots.

    Raises:
        UserError: it has no host, one of them twice, or one without slots.
    """
    parse_hostfile(text, f"--hosts-file {path}")  # its errors name the line
    entries: dict[str, HostEntry] = {}
    for number, line in enumerate(text.splitlines(), 1):
        place = f"--hosts-file {path}, line {number}"
        for host in parse_hostfile(line, place):
            if host.name in entries:
                raise UserError(f"{place}: {host.name} is listed twice; list each host once")
            if host.slots is None:
                raise UserError(
                    f"{place}: {host.name} has no slots; write its number of ranks: "
                    f"{host.name} slots=N"
                )
            entries[host.name] = HostEntry(host, line.strip())
    found = tuple(entry for entry in entries.values() if entry.host.slots)
    if not found:
        raise UserError(f"--hosts-file {path} has no host with slots; add at least one")
    return found


def in_stable_order(
    entries: Sequence[HostEntry], before: Iterable[HostEntry]
) -> tuple[HostEntry, ...]:
    """Return entries in the order that their hosts had before; new ones come last.

    So the ranks keep their places, and the first host, which has the run folder, stays the first.
    """
    known = {entry.host.name: number for number, entry in enumerate(before)}
    return tuple(sorted(entries, key=lambda entry: known.get(entry.host.name, len(known))))


class HostsFile:
    """The hosts in the file, as of its last usable content that did not change for 2 s."""

    def __init__(
        self,
        path: str,
        report: Callable[[str], None],
        read: Callable[[str], str] = read_hosts_file,
    ) -> None:
        """Read the file.

        Args:
            path: the file.
            report: logs a line.
            read: returns its content.

        Raises:
            UserError: it cannot be read, or is not as it should be.
        """
        self.path = path
        self._read, self._report = read, report
        text = read(path)
        self.entries = parse_hosts(text, path)
        """The hosts, in the order of the file at first, then of `in_stable_order`."""
        self._seen = self._judged = (text, "")
        self._since = 0.0

    def poll(self, now: float, at_once: bool = False) -> bool:
        """Read the file again; return whether its hosts have changed.

        A file that cannot be used is reported once; until it is corrected, the old hosts count.

        Args:
            now: seconds of a clock.
            at_once: whether the content counts before it has been the same for 2 s.
        """
        found = self._look()
        if found != self._seen:
            self._seen, self._since = found, now
        if found == self._judged or not (at_once or now - self._since >= _SETTLE_SEC):
            return False
        self._judged = found
        text, fault = found
        try:
            if fault:
                raise UserError(fault)
            entries = in_stable_order(parse_hosts(text, self.path), self.entries)
        except UserError as error:
            self._report(f"{error}; until then the hosts stay as they are")
            return False
        before, self.entries = self.entries, entries
        change = describe_change(before, entries)
        if change:
            self._report(f"{self.path}: {change}")
        return bool(change)

    def _look(self) -> tuple[str, str]:
        """Return the content and the fault; one of them is empty."""
        try:
            return self._read(self.path), ""
        except UserError as error:
            return "", str(error)


def describe_change(before: Sequence[HostEntry], after: Sequence[HostEntry]) -> str:
    """Return what has changed, such as `added c; removed b; a has 2 slots`."""
    old = {entry.host.name: entry.host for entry in before}
    new = {entry.host.name: entry.host for entry in after}
    added = ", ".join(name for name in new if name not in old)
    removed = ", ".join(name for name in old if name not in new)
    parts = [f"added {added}"] if added else []
    parts += [f"removed {removed}"] if removed else []
    for name, host in new.items():
        if name in old and old[name].slots != host.slots:
            parts.append(f"{name} has {host.slots} slot{'' if host.slots == 1 else 's'}")
        elif name in old and old[name] != host:
            parts.append(f"{name} has another login or port")
    return "; ".join(parts)
