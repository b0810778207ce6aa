"""A job and its hosts that exist only on paper, for a supervisor."""

import json

from kaitian_mpi.supervise.job_snapshots import JobSnapshots
from kaitian_mpi.supervise.supervisor import supervise


class FakeRunner:
    """Records what a supervisor asks of the job's runner and its hosts; `run` is a test's own."""

    def __init__(self, folder):
        self.folder = folder
        self.clock = self.stopped = 0
        self.has_saved = False
        self.silent = set()
        """The hosts that do not answer."""
        self.reports, self.pauses, self.saves, self.removed, self.stale = [], [], [], [], []
        self.disk_is_full = False

    def replace_job(self, job):
        self.job = job

    def write_results(self, step, finished, resumed=None):
        """Write a job's results; `resumed`: the step after which it has repeated the others."""
        self.folder.mkdir(parents=True, exist_ok=True)
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if resumed is not None:
            lines = [line for line in lines if json.loads(line)["step"] <= resumed]
        lines.append(json.dumps({"step": step, "time": self.clock}))
        metrics.write_text("".join(f"{line}\n" for line in lines))
        summary = {"steps": step, "finished": finished}
        (self.folder / "summary.json").write_text(json.dumps(summary))

    def pause(self, seconds):
        self.pauses.append(seconds)
        self.clock += seconds

    def now(self):
        return self.clock

    def lost_hosts(self, hosts):
        return frozenset(host.name for host in hosts) & self.silent

    def report(self, text):
        self.reports.append(text)

    def supervise(self, job, max_restarts=3, changes=None):
        snapshots = FakeSnapshots(job, self)
        return supervise(job, self, self, snapshots, max_restarts, changes)


class FakeSnapshots(JobSnapshots):
    """Those of a fake runner's hosts."""

    def __init__(self, job, runner):
        super().__init__(job, runner, runner.report)
        self._runner = runner

    def _save(self):
        self._runner.saves.append(not self._runner.disk_is_full)
        return "as the disk is full" if self._runner.disk_is_full else ""

    def _ask_for_newer(self, hosts):
        return frozenset(), frozenset()

    def _remove(self, hosts):
        self._runner.removed.append([host.name for host in hosts])
        return frozenset(host.name for host in hosts) & self._runner.silent

    def remove_stale(self, hosts):
        self._runner.stale += [[host.name for host in hosts]] if hosts else []
