"""A machine that exists only on paper, for the supervisor of a job."""

import json


class FakeMachine:
    """Records what a supervisor asks of it; `run` is a test's own."""

    def __init__(self, folder):
        self.folder = folder
        self.clock = self.stopped = 0
        self.silent = set()
        """The hosts that do not answer."""
        self.reports, self.pauses, self.saves, self.removed = [], [], [], []
        self.disk_is_full = False

    def replace_job(self, job):
        self.job = job

    def write_results(self, step, finished):
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        summary = {"steps": step, "finished": finished}
        (self.folder / "summary.json").write_text(json.dumps(summary))

    def pause(self, seconds):
        self.pauses.append(seconds)
        self.clock += seconds

    def now(self):
        return self.clock

    def lost(self, hosts):
        return frozenset(host.name for host in hosts) & self.silent

    def save_snapshot(self):
        self.saves.append(not self.disk_is_full)
        return not self.disk_is_full

    def remove_snapshots(self, hosts):
        self.removed.append([host.name for host in hosts])
        return frozenset(host.name for host in hosts) & self.silent

    def report(self, text):
        self.reports.append(text)
