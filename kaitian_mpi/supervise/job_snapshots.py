"""The snapshots that a job's hosts keep in memory between its starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

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

    def end(self, code: int) -> None:
        """Remove what is no longer needed once the job has ended with an exit code.

        A finished run removes its own snapshots, except on hosts that were left out. The newest
        state of another one is written to disk first; if it cannot be, all snapshots are kept.
        """
        config = self._job.config
        if not self._job.owns_snapshots:
            return
        if code and not self._save():
            self._report(
                f"the newest state is still in memory ({folders.SHM}): make room on the disk, and "
                f"run the same command with --run-dir {config.run_dir} --resume auto "
                f"--snapshots {config.snapshots}"
            )
            return
        hosts = [host for name, host in self._remote.items() if code or name in self._left_out]
        if missed := self._remove(hosts):
            self._report(
                f"{folders.SHM}/kaitian-{config.snapshots}-* may be left on "
                f"{list_names(sorted(missed))}"
            )

    def _save(self) -> bool:
        """Write this machine's snapshot to disk if it is newer; return whether the disk has it."""
        config = self._job.config
        if not any(folders.SHM.glob(f"kaitian-{config.snapshots}-*")):
            return True
        # Loads torch, which takes seconds.
        from kaitian_mpi.train.checkpoint.files import save_snapshot

        try:
            save_snapshot(config.snapshots, self._job.folder, config.keep_checkpoints)
        except (OSError, UserError) as error:
            self._report(f"the snapshot in memory could not be written to disk: {error}")
            return False
        return True

    def _remove(self, hosts: Sequence[Host]) -> frozenset[str]:
        """Remove the job's snapshots here and on hosts; return the hosts that do not answer."""
        name = f"kaitian-{self._job.config.snapshots}-*"
        for folder in folders.SHM.glob(name):
            folders.remove_private(folder)
        codes = self._shell.run(hosts, ["rm", "-rf", f"{folders.SHM}/{name}"])
        return frozenset(host for host, code in codes.items() if code == NO_ANSWER)
