"""Watches this host's ranks until MPI has started, beside one of them. Imports little.

A rank that waits in `MPI_Init` for one that has ended waits forever, holding the GIL, and the
launcher may not say so: Open MPI's ignores an exit code of 0, and with fault tolerance any end.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress

_INTERVAL_SEC = 2.0
# Longer than the launcher takes to start a host's ranks, and than those that got out of `MPI_Init`
# already, and may have ended since, are ahead of this one.
_PATIENCE_SEC = 15.0
# If all ranks end by the same error, the job ends by itself.
_ALL_END_SEC = 4.0
_REPORT_SEC = 60.0
_KILLED_SEC = 5.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def read_stat(pid: int) -> tuple[str, int, str]:
    """Return a process's state, its parent's pid, and when it started; raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[1]), fields[19].decode()


def children_of(parent: int) -> list[int]:
    """Return the pids of a process's children that have not ended."""
    try:
        pids = []
        for thread in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{thread}/children") as file:
                pids += file.read().split()
    except OSError:  # not every kernel lists them
        pids = [name for name in os.listdir("/proc") if name.isdigit()]
    children = []
    for pid in map(int, pids):
        with suppress(OSError):  # it has ended
            state, its_parent, _ = read_stat(pid)
            if its_parent == parent and state != "Z":
                children.append(pid)
    return children


def variables_of(pid: int) -> dict[bytes, bytes]:
    """Return the environment that a process was started with, as far as it can be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = (entry.partition(b"=") for entry in file.read().split(b"\0"))
            return {name: value for name, _, value in pairs}
    except OSError:
        return {}


class Siblings:
    """The ranks of one job that one launcher process has started on this host.

    Attributes:
        world_ranks: each one's world rank, by its local rank, as far as it has been seen.
    """

    def __init__(self, launcher: int, names: list[str]) -> None:
        """Watch the launcher's children; `names` are of the variables that tell a rank.

        Its job, its world rank, the number of all ranks, its local rank, and that of this host's.
        """
        self._launcher = launcher
        job, world_rank, world_size, local_rank, local_size = (name.encode() for name in names)
        self._names = job, world_rank, local_rank
        self._job = os.environb[job]
        self._world_size = int(os.environb[world_size])
        self._size = int(os.environb[local_size])
        self._pids: dict[int, int] = {}
        self._missing_since: dict[int, float] = {}
        self.world_ranks: dict[int, int] = {}

    def missing(self, now: float) -> dict[int, float]:
        """Return since when local ranks have been missing, those of now."""
        alive = children_of(self._launcher)
        job, world_rank, local_rank = self._names
        unknown = 0
        for pid in set(alive).difference(self._pids.values()):
            found = variables_of(pid)
            if found.get(job) == self._job and {world_rank, local_rank} <= found.keys():
                number = int(found[local_rank])
                self._pids[number], self.world_ranks[number] = pid, int(found[world_rank])
            # A program that shows a title of its own has it in the place of its variables.
            unknown += b"PATH" not in found
        for number in range(self._size):
            if self._pids.get(number) in alive or (number not in self._pids and unknown):
                self._missing_since.pop(number, None)
            else:
                self._missing_since.setdefault(number, now)
        return self._missing_since

    def names_of(self, missing: list[int]) -> str:
        """Return local ranks as text, by their world ranks if these are known."""
        unseen = set(range(self._size)).difference(self.world_ranks)
        if len(unseen) == 1 and self._size == self._world_size:  # it is the one left
            others = set(self.world_ranks.values())
            self.world_ranks[unseen.pop()] = min(set(range(self._world_size)).difference(others))
        known = self.world_ranks
        return ", ".join(f"rank {known[n]}" if n in known else f"local rank {n}" for n in missing)


def wait_for_start(siblings: Siblings, rank: int, prefix: str, reports: bool) -> str:
    """Wait until this rank has started MPI or has ended; return what is wrong, "" for nothing."""
    began = time.monotonic()
    while os.getppid() == rank:
        if select.select([0], [], [], _INTERVAL_SEC)[0]:
            if os.read(0, 1):
                return ""
            time.sleep(_INTERVAL_SEC)  # it has ended, or has become another program
            if os.getppid() == rank:
                return ""
        now = time.monotonic()
        since = siblings.missing(now)
        if missing := [n for n, gone_at in since.items() if now - gone_at >= _PATIENCE_SEC]:
            named = siblings.names_of(missing)
            return f"{named} of this host ended before MPI started; see what it printed"
        if reports and now - began > _REPORT_SEC:
            reports = False
            waited = f"{prefix} has waited {_REPORT_SEC:.0f} s for all ranks to start MPI"
            show(f"{waited}; ranks of other hosts have ended, or are still starting", 2)
    return "this rank ended before MPI started"


def show(text: str, descriptor: int) -> None:
    """Print a line unless that would block."""
    try:
        if select.select([], [descriptor], [], 0.5)[1]:
            os.write(descriptor, f"{text}\n".encode(errors="surrogateescape"))
    except (OSError, ValueError):
        pass


def end_job(launcher: int, started: str, text: str) -> None:
    """End the job by its launcher on this host, unless it is over."""
    try:
        if read_stat(launcher)[2] != started:
            return
        # Of the rank's own stderr, the launcher would wait for the end.
        show(text, os.open(f"/proc/{launcher}/fd/2", os.O_WRONLY | os.O_APPEND))
    except OSError:
        pass
    with suppress(OSError):
        os.kill(launcher, signal.SIGTERM)


def main(prefix: str, rank: str, launcher: str, *names: str) -> None:
    """Watch the rank of this pid and the launcher's other ranks; end the job if one is missing."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.set_blocking(0, True)
    daemon, started = int(launcher), read_stat(int(launcher))[2]
    siblings, local_rank = Siblings(daemon, list(names)), int(os.environ[names[3]])
    fault = wait_for_start(siblings, int(rank), prefix, reports=local_rank == 0)
    if not fault:
        return
    for descriptor in (1, 2):  # those of the rank, whose end the launcher waits for
        os.close(descriptor)
    if os.getppid() != int(rank):
        time.sleep(_ALL_END_SEC)
        if local_rank not in siblings.missing(time.monotonic()):
            return  # the shell, say, that has started it goes on
    time.sleep(min(local_rank, 10))  # then one rank of a host ends the job
    end_job(daemon, started, f"{prefix} {fault}; ending the job")
    time.sleep(_KILLED_SEC)
    if os.getppid() == int(rank):
        os.kill(int(rank), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
