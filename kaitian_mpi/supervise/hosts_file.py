"""`--hosts-file`: which hosts a supervised job should have, read again while it runs."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.hosts import Host, parse_hostfile

_MAX_BYTES = 1 << 20
_SETTLE_SEC = 2.0  # longer than an editor takes to write a file


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
    except (OSError, UnicodeDecodeError) as error:
        fault = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(
            f"--hosts-file {path}: {fault}; name a text file that can be read"
        ) from error


def parse_hosts(text: str, path: str) -> tuple[Host, ...]:
    """Parse the file's content: a hostfile of mpirun's with each host's slots.

    Raises:
        UserError: it has no host with slots, or one without.
    """
    hosts = parse_hostfile(text, f"--hosts-file {path}")
    for host in hosts:
        if host.slots is None:
            raise UserError(
                f"--hosts-file {path}: {host.name} has no slots; write its number of ranks: "
                f"{host.name} slots=N"
            )
    found = tuple(host for host in hosts if host.slots)
    if not found:
        raise UserError(f"--hosts-file {path} has no host with slots; add at least one")
    return found


def hostfile_of(hosts: Iterable[Host]) -> str:
    """Return the content of a hostfile with these hosts."""
    lines = []
    for host in hosts:
        login = f"{host.user}@" if host.user else ""
        port = f" port={host.port}" if host.port else ""
        lines.append(f"{login}{host.name} slots={host.slots}{port}\n")
    return "".join(lines)


def in_stable_order(hosts: Sequence[Host], before: Iterable[Host]) -> tuple[Host, ...]:
    """Return hosts in the order that they had before; new ones come last.

    So the ranks keep their places, and the first host, which has the run folder, stays the first.
    """
    known = {host.name: number for number, host in enumerate(before)}
    return tuple(sorted(hosts, key=lambda host: known.get(host.name, len(known))))


class HostsFile:
    """The hosts in the file, as of its last usable content that did not change for 2 s.

    Args:
        path: the file.
        report: logs a line.
        read: returns its content.

    Raises:
        UserError: it cannot be read, or is not as it should be.
    """

    def __init__(
        self,
        path: str,
        report: Callable[[str], None],
        read: Callable[[str], str] = read_hosts_file,
    ) -> None:
        self.path = path
        self._read, self._report = read, report
        text = read(path)
        self.hosts = parse_hosts(text, path)
        """The hosts, in the order of the file at first, then of `in_stable_order`."""
        self._seen = self._judged = (text, "")
        self._since = 0.0

    def poll(self, now: float) -> None:
        """Read the file again; `now` is in seconds of a clock.

        A file that cannot be used is reported once; until it is corrected, the old hosts count.
        """
        try:
            found = self._read(self.path), ""
        except UserError as error:
            found = "", str(error)
        if found != self._seen:
            self._seen, self._since = found, now
        if found == self._judged or now - self._since < _SETTLE_SEC:
            return
        self._judged = found
        text, fault = found
        try:
            if fault:
                raise UserError(fault)
            hosts = in_stable_order(parse_hosts(text, self.path), self.hosts)
        except UserError as error:
            self._report(f"{error}; until then the hosts stay as they are")
            return
        if hosts != self.hosts:
            self.hosts = hosts
            shown = ", ".join(hostfile_of(hosts).splitlines())
            self._report(f"{self.path} has changed: {shown}")
