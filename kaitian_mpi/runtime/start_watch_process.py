"""Watches this host's ranks until MPI has started, beside one of them. Imports little.

A rank that waits in `MPI_Init` for one that has ended waits forever, holding the GIL, and the
launcher may not say so: Open MPI's ignores an exit code of 0, and with fault tolerance any end.

Ranks of other hosts may end before code of this package runs there. On mpirun's own host, mpirun
is asked for them. Elsewhere a rank that has ended cannot be told from one that is still loading its
program, so that this host only waits for a limited time.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

_INTERVAL_SEC = 2.0
# Longer than the launcher takes to start a host's ranks, and than those that got out of `MPI_Init`
# already, and may have ended since, are ahead of this one.
_PATIENCE_SEC = 15.0
# If all ranks end by the same error, the job ends by itself.
_ALL_END_SEC = 4.0
_REPORT_SEC = 60.0
_KILLED_SEC = 5.0
# More than mpirun's own host takes to notice it, and to end the job.
_ELSEWHERE_SEC = 25.0
_ASK_SEC = 5.0
_ANSWER_SEC = 20.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOPPED = "T"
_STANDS_FOR = "for-"


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


def rank_behind(pid: int) -> int:
    """Return the pid of the rank for which a process stands, see `forked_rank.py`; else its own."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/comm") as file:
        name = file.read().strip()
        if name.startswith(_STANDS_FOR):
            return int(name.removeprefix(_STANDS_FOR))
    return pid


def has_watch(pid: int) -> bool:
    """Return whether a process, or one that it has started, has a process like this one."""
    for child in children_of(pid):
        with suppress(OSError), open(f"/proc/{child}/cmdline", "rb") as file:
            if os.path.basename(__file__).encode() in file.read() or has_watch(child):
                return True
    return False


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

    @property
    def has_other_hosts(self) -> bool:
        """Whether ranks of the job are on other hosts."""
        return self._size < self._world_size

    def missing(self, now: float) -> dict[int, float]:
        """Return since when local ranks have been missing, those of now."""
        alive = children_of(self._launcher)
        job, world_rank, local_rank = self._names
        unknown = 0
        for pid in set(alive).difference(self._pids.values()):
            variables = variables_of(pid)
            if variables.get(job) == self._job and {world_rank, local_rank} <= variables.keys():
                number = int(variables[local_rank])
                self.world_ranks[number] = int(variables[world_rank])
                self._pids[number] = pid
            # A program that shows a title of its own has it in the place of its variables.
            unknown += b"PATH" not in variables
        for number in range(self._size):
            if self._pids.get(number) in alive or (number not in self._pids and unknown):
                self._missing_since.pop(number, None)
            else:
                self._missing_since.setdefault(number, now)
        return self._missing_since

    def late(self) -> dict[int, str]:
        """Return the state of the processes of local ranks that have not begun to start MPI."""
        late = {}
        for number, pid in self._pids.items():
            with suppress(OSError):  # it has ended
                rank = rank_behind(pid)
                if not has_watch(rank):
                    late[number] = read_stat(rank)[0]
        return late

    def names_of(self, missing: list[int]) -> str:
        """Return local ranks as text, by their world ranks if these are known."""
        unseen = set(range(self._size)).difference(self.world_ranks)
        if len(unseen) == 1 and self._size == self._world_size:  # it is the one left
            others = set(self.world_ranks.values())
            self.world_ranks[unseen.pop()] = min(set(range(self._world_size)).difference(others))
        world_ranks = self.world_ranks
        return ", ".join(
            f"rank {world_ranks[n]}" if n in world_ranks else f"local rank {n}" for n in missing
        )


class OtherHosts:
    """The ranks of the job on other hosts, of which mpirun tells on its own host."""

    def __init__(self, prefix: str, limit: str, *asked: str) -> None:
        """Ask with these arguments of `rank_states_process.py`, none if mpirun is elsewhere.

        Without an answer, wait as long as `limit` says, such as `VARIABLE=600`: the seconds, 0 for
        forever, with the name of the environment variable that sets them.
        """
        folder = os.path.dirname(os.path.abspath(__file__))
        script = os.path.join(folder, "rank_states_process.py")
        self._command = [sys.executable, "-I", "-S", script, *asked]
        self._prefix = prefix
        self._can_ask = bool(asked)
        self._variable, _, seconds = limit.partition("=")
        self._limit_sec = float(seconds)
        self._began = self._asked = time.monotonic()
        self._ended_since: dict[int, float] = {}
        self._has_reported = False

    def fault(self, now: float, host_ranks: Iterable[int]) -> str:
        """Return a fault, "" for none; `host_ranks` are this host's ranks."""
        if now - self._asked < _ASK_SEC:
            return ""
        self._asked = now
        host_ranks = set(host_ranks)
        ranks = {rank: host for rank, host in self._ask().items() if rank not in host_ranks}
        for rank, (_, state) in ranks.items():
            if state == "ended":
                self._ended_since.setdefault(rank, now)
        if ended := [n for n, since in self._ended_since.items() if now - since >= _PATIENCE_SEC]:
            named = by_host({rank: ranks[rank][0] for rank in ended if rank in ranks})
            return (
                f"{named} ended before MPI started; see what was printed there, and with "
                "kaitian-doctor --hostfile=FILE whether each host has this package"
            )
        return self._report(now - self._began, ranks)

    def _report(self, waited_sec: float, ranks: dict[int, tuple[str, str]]) -> str:
        """Say what this host waits for; return a fault if it has done so for too long."""
        limit_sec = 0.0 if ranks else self._limit_sec
        if limit_sec and waited_sec > limit_sec:
            return (
                f"not all ranks of other hosts have started MPI within {limit_sec:g} s; see what "
                f"was printed there, or set {self._variable} to more seconds if they only load "
                "their programs slowly"
            )
        if waited_sec > _REPORT_SEC and not self._has_reported:
            self._has_reported = True
            late = by_host({n: host for n, (host, state) in ranks.items() if state == "running"})
            others = "ranks of other hosts have ended, or are still starting"
            others = f"{late} still run without having started it" if late else others
            if limit_sec:
                others += f"; the job ends after {limit_sec:g} s ({self._variable})"
            waited = f"{self._prefix} has waited {_REPORT_SEC:.0f} s for all ranks to start MPI"
            show(f"{waited}; {others}", 2)
        return ""

    def _ask(self) -> dict[int, tuple[str, str]]:
        """Return each rank's host and state; nothing if the launcher does not tell."""
        if not self._can_ask:
            return {}
        import subprocess  # not by each rank at its start, as it takes longer than all the others

        try:
            result = subprocess.run(  # noqa: S603  # our own file, no shell
                self._command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_ANSWER_SEC,
                check=False,
            )
            lines = [line.split() for line in result.stdout.decode().splitlines()]
            return {int(rank): (host, state) for rank, host, state in lines}
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return {}


def by_host(hosts: dict[int, str]) -> str:
    """Return ranks as text, such as `ranks 2-4, 7 on node-b and rank 8 on node-c`."""
    texts = []
    for host in dict.fromkeys(hosts.values()):
        ranks = sorted(rank for rank, rank_host in hosts.items() if rank_host == host)
        runs: list[list[int]] = []
        for rank in ranks:
            if runs and rank == runs[-1][1] + 1:
                runs[-1][1] = rank
            else:
                runs.append([rank, rank])
        spans = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
        texts.append(f"rank{'s' * (len(ranks) > 1)} {spans} on {host}")
    return " and ".join(texts)


class LateRanks:
    """The ranks of this host that have not begun to start MPI, which one of the others names."""

    def __init__(self, siblings: Siblings, prefix: str, local_rank: int, limit_sec: float) -> None:
        """Look at the siblings of a local rank; one that is stopped may be so for `limit_sec`."""
        self._siblings = siblings
        self._prefix = prefix
        self._local_rank = local_rank
        self._limit_sec = limit_sec
        self._began = time.monotonic()
        self._has_reported = False

    def fault(self, now: float) -> str:
        """Say who is waited for; return what is wrong if some are stopped for too long."""
        waited_sec = now - self._began
        is_too_long = 0 < self._limit_sec < waited_sec
        if waited_sec <= _REPORT_SEC and not is_too_long:
            return ""
        late = self._siblings.late()
        if self._local_rank != min(self._siblings.world_ranks.keys() - late.keys(), default=-1):
            return ""
        stopped = [number for number, state in late.items() if state == _STOPPED]
        if stopped and is_too_long:
            named = self._siblings.names_of(stopped)
            return f"{named} of this host is stopped, and has not started MPI in {waited_sec:.0f} s"
        if late and not self._has_reported:
            self._has_reported = True
            named = self._siblings.names_of(sorted(late))
            how = "stopped" if len(stopped) == len(late) else "still running without having done so"
            waited = f"{self._prefix} has waited {waited_sec:.0f} s for all ranks to start MPI"
            show(f"{waited}; of this host, {named} is {how}", 2)
        return ""


def wait_for_start(
    siblings: Siblings, rank: int, others: OtherHosts | None, late: LateRanks
) -> str:
    """Wait until this rank has started MPI or has ended; return what is wrong, "" for nothing.

    `others` are the ranks of other hosts, if this process is the one of its host to watch them.
    """
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
        if others is not None and (fault := others.fault(now, siblings.world_ranks.values())):
            return fault
        if fault := late.fault(now):
            return fault
    return "this rank ended before MPI started"


def show(text: str, descriptor: int) -> None:
    """Print a line unless that would block."""
    try:
        if select.select([], [descriptor], [], 0.5)[1]:
            os.write(descriptor, f"{text}\n".encode(errors="surrogateescape"))
    except (OSError, ValueError):
        pass


def is_ended_by_mpirun(rank: int, within_sec: float) -> bool:
    """Wait for mpirun's own host to end the job, and so this rank; return whether it has.

    An end of this host's daemon would end the job, too, but with code 0.
    """
    deadline = time.monotonic() + within_sec
    while time.monotonic() < deadline and os.getppid() == rank:
        time.sleep(_INTERVAL_SEC / 10)
    return os.getppid() != rank


def let_go() -> None:
    """Close what this process has of the rank's, whose end the launcher waits for."""
    for descriptor in (1, 2):
        with suppress(OSError):
            os.close(descriptor)


def end_job(launcher: int, started: str, text: str) -> None:
    """End the job by its launcher on this host, unless it is over."""
    with suppress(OSError):
        if read_stat(launcher)[2] != started:
            return
        # Of the rank's own stderr, the launcher would wait for the end.
        show(text, os.open(f"/proc/{launcher}/fd/2", os.O_WRONLY | os.O_APPEND))
    with suppress(OSError):
        os.kill(launcher, signal.SIGTERM)


def kill_parent(pid: int) -> None:
    """Kill this process's parent, if it is still this one."""
    if os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)


def main(
    prefix: str, rank: str, launcher: str, limit: str, address: str, joining: str, *names: str
) -> None:
    """Watch the rank of this pid and the launcher's other ranks; end the job if one is missing."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.set_blocking(0, True)
    daemon = int(launcher)
    started = read_stat(int(launcher))[2]
    siblings = Siblings(daemon, list(names))
    local_rank = int(os.environ[names[3]])
    others = None
    if local_rank == 0 and siblings.has_other_hosts:
        command = (launcher, address, os.environ[names[0]], joining) if address else ()
        others = OtherHosts(prefix, limit, *command)
    late = LateRanks(siblings, prefix, local_rank, float(limit.partition("=")[2]))
    fault = wait_for_start(siblings, int(rank), others, late)
    if not fault:
        return
    said = f"{prefix} {fault}; ending the job"
    patience_sec = min(local_rank, 10)  # then one rank of a host ends the job
    if os.getppid() != int(rank):
        let_go()
        time.sleep(_ALL_END_SEC + (0 if address else _ELSEWHERE_SEC))
        if local_rank not in siblings.missing(time.monotonic()):
            return  # the shell, say, that has started it goes on
    elif not address:
        if is_ended_by_mpirun(int(rank), patience_sec + _ELSEWHERE_SEC):
            return
        show(said, 2)  # the daemon's own stderr is not shown
        said = ""
        kill_parent(int(rank))  # which ends the job, unless it survives that
        let_go()
        time.sleep(_KILLED_SEC)
    let_go()
    time.sleep(patience_sec)
    end_job(daemon, started, said)
    time.sleep(_KILLED_SEC)
    kill_parent(int(rank))


if __name__ == "__main__":
    main(*sys.argv[1:])
