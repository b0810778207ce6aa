"""Parses and edits mpirun's hostfiles and host lists. Pure.

The rules are those of Open MPI 5 (PRRTE): `host slots=4`. A host on n > 1 lines without slots has n
slots, and a host on one line as many as cores. `--host a:2,b` gives b one slot; repeated entries
add up, and the list selects from the hostfile's hosts. `host:4` in a hostfile is MPICH's syntax.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from kaitian_mpi.errors import UserError

# A name never starts with a dash: ssh would mistake it for an option.
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_ENTRY = re.compile(rf"(?:(?P<user>{_NAME})@)?(?P<name>{_NAME})(?::(?P<slots>\d{{1,6}}|\*|auto))?")
_SETTING = re.compile(r"([A-Za-z_-]+)\s*=\s*(\S+)")
_COMMENT = re.compile(r"(#|//).*")
_SLOT_KEYS = ("slots", "cpu", "count")


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host and how mpirun's agent reaches it."""

    name: str
    slots: int | None = None
    """The most ranks that mpirun starts there; None: as many as the host has cores."""
    user: str = ""
    """The user to log in as; empty for ssh's default."""
    port: int = 0
    """The port of its ssh server; 0 for ssh's default."""


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Parse a hostfile's content; return each host once, in the order of their first lines."""
    entries = []
    for number, line in enumerate(text.split("\n"), 1):
        entry = _read_line(line, f"{path}, line {number}")
        if entry is not None:
            entries.append(entry)
    return _add_up(entries)


def parse_host_list(text: str) -> tuple[Host, ...]:
    """Parse the value of `--host`, such as `node-a:2,node-b`."""
    entries = []
    for word in text.split(","):
        host = _read_entry(word.strip(), "--host")
        entries.append(host if ":" in word else replace(host, slots=1))
    return _add_up(entries)


def choose(from_files: Sequence[Host], from_list: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts that mpirun uses, given those of its hostfiles and its `--host`."""
    if not (from_files and from_list):
        return tuple(from_files or from_list)
    slots = {host.name: host.slots for host in from_list}
    return tuple(replace(host, slots=slots[host.name]) for host in from_files if host.name in slots)


def total_slots(hosts: Sequence[Host]) -> int | None:
    """Return the slots of all hosts; None if a host does not give its number."""
    slots = [host.slots for host in hosts if host.slots is not None]
    return sum(slots) if len(slots) == len(hosts) else None


def place_by_slot(hosts: Sequence[Host], ranks: int) -> list[str]:
    """Return each rank's host; with more ranks than slots, the hosts are filled again."""
    placed: list[str] = []
    while len(placed) < ranks:
        before = len(placed)
        for host in hosts:
            ranks_left = ranks - len(placed)
            count = ranks_left if host.slots is None else min(host.slots, ranks_left)
            placed += [host.name] * count
        if len(placed) == before:  # no host has a slot
            return []
    return placed


def hostfile_without(text: str, lost: Collection[str]) -> str:
    """Return a hostfile's content without the lines of some hosts."""
    lines = []
    for line in text.splitlines():
        host = _read_line(line, "")
        if host is not None and host.name not in lost:
            lines.append(line + "\n")
    return "".join(lines)


def host_list_without(text: str, lost: Collection[str]) -> str:
    """Return a value of `--host` without some hosts; empty if none is left."""
    words = [word.strip() for word in text.split(",")]
    return ",".join(word for word in words if _read_entry(word, "").name not in lost)


def _read_line(line: str, place: str) -> Host | None:
    """Return the host of a hostfile's line; None for an empty line. `place` is for errors."""
    content = _COMMENT.sub("", line).strip()
    if not content:
        return None
    entry = content.split()[0]
    host = _read_entry(entry, place)
    pairs = _SETTING.findall(content.removeprefix(entry))
    settings = {key.replace("-", "_"): value for key, value in pairs}
    for key in _SLOT_KEYS:
        if settings.get(key, "").isdecimal():
            host = replace(host, slots=int(settings[key]))
    user = settings.get("username", settings.get("user_name", ""))
    if user:
        host = replace(host, user=_read_entry(user, place).name)
    if settings.get("port", "").isdecimal():
        host = replace(host, port=int(settings["port"]))
    return host


def _read_entry(word: str, place: str) -> Host:
    match = _ENTRY.fullmatch(word)
    if match is None:
        raise UserError(
            f"{place}: {word!r} is not a host name; use letters, digits, dots, dashes and "
            "underscores, as in node-a or user@node-a"
        )
    slots = match["slots"]
    return Host(
        name=match["name"],
        slots=int(slots) if slots and slots.isdecimal() else None,
        user=match["user"] or "",
    )


def _add_up(entries: Iterable[Host]) -> tuple[Host, ...]:
    """Merge the entries of each host, whose slots add up."""
    hosts: dict[str, Host] = {}
    for entry in entries:
        host = hosts.get(entry.name)
        if host is None:
            hosts[entry.name] = entry
        else:
            slots = [1 if slots is None else slots for slots in (host.slots, entry.slots)]
            hosts[entry.name] = replace(host, slots=sum(slots))
    return tuple(hosts.values())
