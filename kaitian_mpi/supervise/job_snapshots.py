"""The snapshots that a job's hosts keep in memory between its starts."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence, Set

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe import folders
from kaitian_mpi.preflight.verdict import list_names
from kaitian_mpi.supervise.hosts import Host
from kaitian_mpi.supervise.remote_hosts import NO_ANSWER
from kaitian_mpi.supervise.remote_shell import RemoteShell
from kaitian_mpi.supervise.starts import JobCommand


class JobSnapshots:
    """Knows which hosts may have a snapshot of a job, and removes those of no more use."""

    def __init__(self, job: JobCommand, shell: RemoteShell, report: Callable[[str], None]) -> None:
        """Expect snapshots on the hosts of the first start; `report` logs a line."""
        self._job = job
        self._shell = shell
        self._report = report
        self._remote = {host.name: host for host in job.remote}  # of all starts
        self._left_out: set[str] = set()  # by any start

    def follow_hosts(self, remote: Sequence[Host], left_out: Set[str]) -> None:
        """Expect snapshots on the hosts of the next start, too, which leaves out some hosts."""
        by_name = {host.name: host for host in remote}
        self._left_out |= left_out | (self._remote.keys() - by_name.keys())
        self._remote |= by_name

    def remove_stale(self, hosts: Sequence[Host]) -> None:
        """Remove hosts' outdated snapshots, from before the job continued without these hosts.

        Only each host's own folder is removed, in case several hosts share /dev/shm.
        """
        folder = folders.snapshot_folder_by_shell(self._job.config.snapshots)
        self._shell.run(hosts, ["rm", "-rf", f'"{folder}"'])

    def end(self, finished: bool) -> None:
        """Remove what is no longer needed once the job has ended.

        A finished run removes its own snapshots, except on hosts that were left out. The newest
        state of another one is written to disk first; if it cannot be, or is in another host's
        memory, all snapshots are kept. So are those of hosts that cannot be asked.
        """
        if not self._job.owns_snapshots:
            return
        hosts = [
            host for name, host in self._remote.items() if not finished or name in self._left_out
        ]
        unknown: frozenset[str] = frozenset()
        if not finished:
            if fault := self._save():
                self._report_kept(f"in memory ({folders.SHM}), {fault}; correct that, and")
                return
            newer, unknown = self._ask_for_newer(hosts)
            if newer:
                names = list_names(sorted(newer))
                self._report_kept(f"in the memory of {names} ({folders.SHM}):")
                return
        missed = unknown | self._remove([host for host in hosts if host.name not in unknown])
        if missed:
            self._report(
                f"{folders.SHM}/kaitian-{self._job.config.snapshots}-* may be left on "
                f"{list_names(sorted(missed))}"
            )

    def _report_kept(self, place: str) -> None:
        config = self._job.config
        self._report(
            f"the newest state is still {place} run the same command with --run-dir "
            f"{config.run_dir} --resume auto --snapshots {config.snapshots}"
        )

    def _save(self) -> str:
        """Write this machine's snapshot to disk if it is newer; return why that has failed."""
        config = self._job.config
        if not any(folders.SHM.glob(f"kaitian-{config.snapshots}-*")):
            return ""
        # Loads torch, which takes seconds.
        from kaitian_mpi.train.checkpoint.files import save_snapshot

        try:
            save_snapshot(config.snapshots, self._job.folder, config.keep_checkpoints)
        except (OSError, UserError) as error:
            return f"as it could not be written to disk: {error}"
        return ""

    def _ask_for_newer(self, hosts: Sequence[Host]) -> tuple[frozenset[str], frozenset[str]]:
        """Ask hosts for snapshots that are newer than the disk's.

        Returns:
            The hosts that have one, and those that cannot be asked.
        """
        if not hosts:
            return frozenset(), frozenset()
        from kaitian_mpi.train.checkpoint.files import run_files  # loads torch as well

        config = self._job.config
        step = run_files(self._job.folder, config.keep_checkpoints).newest_step()
        pattern = f"{folders.SHM}/kaitian-{config.snapshots}-*/step-*.json"
        script = (
            f"for path in {pattern}; do step=${{path##*/step-}}; step=${{step%.json}}; "
            f'[ "${{step%%-*}}" -gt {-1 if step is None else step} ] && exit 0; done; exit 1'
        )
        codes = self._shell.run(hosts, ["sh", "-c", shlex.quote(script)])
        newer = frozenset(name for name, code in codes.items() if code == 0)
        return newer, _without_answer(hosts, codes)

    def _remove(self, hosts: Sequence[Host]) -> frozenset[str]:
        """Remove the job's snapshots here and on hosts; return the hosts that do not answer."""
        name = f"kaitian-{self._job.config.snapshots}-*"
        for folder in folders.SHM.glob(name):
            folders.remove_private(folder)
        codes = self._shell.run(hosts, ["rm", "-rf", f"{folders.SHM}/{name}"])
        return _without_answer(hosts, codes)


def _without_answer(hosts: Sequence[Host], codes: Mapping[str, int]) -> frozenset[str]:
    """Return the hosts without an exit code of their own."""
    return frozenset(host.name for host in hosts if codes.get(host.name, NO_ANSWER) == NO_ANSWER)
